// One batch of the page: its progress, its errors by kind, and its files.

import { ROOT, add, addButton, headers, newElement, showLines } from "./elements.js";
import { explain } from "./run.js";
import { refusal } from "./stream.js";

const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);
// The rate is the rate of this time.
const RATE_MS = 30_000;
const FACTS = [
  ["lines", "Lines"],
  ["rate", "Lines per second"],
  ["left", "Time left"],
  ["window", "Window"],
  ["tokens", "Tokens"],
];

/** Return the answer of an endpoint as JSON. Throws Refused, or a TypeError without a connection. */
export async function call(path, options = {}) {
  const response = await fetch(`${ROOT}v1/${path}`, { ...options, headers: { ...headers(), ...options.headers } });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Shows one batch, given as the answers of the API. */
export class Batch {
  constructor(id) {
    this.id = id;
    this.samples = []; // [time, number of finished lines]
    this.element = newElement("article", "turn batch", { ariaLabel: `Batch ${id}` });
    const head = add(this.element, "div", "batch-head");
    this.status = add(head, "p", "status");
    add(head, "code", "", { textContent: id });
    this.bar = add(this.element, "progress", "", { ariaLabel: "Finished lines" });
    const facts = add(this.element, "dl", "facts");
    this.facts = Object.fromEntries(
      FACTS.map(([name, title]) => {
        const fact = add(facts, "div");
        add(fact, "dt", "", { textContent: title });
        return [name, add(fact, "dd", name)];
      }),
    );
    this.errors = add(this.element, "ul", "errors", { ariaLabel: "Errors by kind", hidden: true });
    const acts = add(this.element, "div", "acts");
    this.cancel = this.button(acts, "Cancel", () => this.sendCancel());
    this.answers = this.button(acts, "Answers", () => this.download("output", this.batch.output_file_id));
    this.failures = this.button(acts, "Errors", () => this.download("errors", this.batch.error_file_id));
    this.error = add(this.element, "div", "error", { role: "alert", hidden: true });
  }

  get isOver() {
    return ENDED.has(this.batch?.status);
  }

  show(batch) {
    this.batch = batch;
    const { total, completed, failed } = batch.request_counts;
    const finished = completed + failed;
    this.samples.push([performance.now(), finished]);
    while (this.samples.length > 2 && this.samples.at(-1)[0] - this.samples[1][0] >= RATE_MS) this.samples.shift();
    const rate = this.isOver ? meanRate(batch, finished) : this.rate();
    this.status.textContent = batch.status.replace("_", " ");
    this.bar.max = total || 1;
    this.bar.value = finished;
    this.fact("lines", `${completed} answered, ${failed} failed, ${total} in all`);
    this.fact("rate", rate === null ? "" : rate.toFixed(rate < 10 ? 2 : 0));
    this.fact("left", this.isOver || !rate ? "" : span((total - finished) / rate));
    this.fact("window", `${batch.completion_window}, until ${new Date(1000 * batch.expires_at).toLocaleString()}`);
    this.fact("tokens", batch.usage.total_tokens ? batch.usage.total_tokens.toLocaleString("en") : "");
    this.showErrors();
    this.cancel.hidden = this.isOver || batch.status === "cancelling";
    this.answers.hidden = batch.output_file_id === null;
    this.failures.hidden = batch.error_file_id === null;
  }

  /** Return the lines per second of the last time, or null if it is too short. */
  rate() {
    const [[firstMs, first], [lastMs, last]] = [this.samples[0], this.samples.at(-1)];
    return lastMs - firstMs < 1000 ? null : (1000 * (last - first)) / (lastMs - firstMs);
  }

  fact(name, text) {
    this.facts[name].textContent = text;
    this.facts[name].parentElement.hidden = text === "";
  }

  showErrors() {
    const kinds = Object.entries(this.batch.error_counts).sort((a, b) => b[1] - a[1]);
    const lines = [
      ...kinds.map(([code, count]) => `${code}: ${count}`),
      ...(this.batch.errors?.data ?? []).map(({ line, message }) => (line === null ? message : `line ${line}: ${message}`)),
    ];
    const current = [...this.errors.children].map((item) => item.textContent);
    if (current.join("\n") === lines.join("\n")) return; // A reader may have selected them.
    this.errors.hidden = lines.length === 0;
    this.errors.replaceChildren();
    for (const line of lines) add(this.errors, "li").textContent = line;
  }

  button(parent, text, act) {
    const button = addButton(parent, text, async () => {
      button.disabled = true;
      await act().then(() => showLines(this.error, []), (error) => showLines(this.error, explain(error)));
      button.disabled = false;
    });
    return Object.assign(button, { hidden: true, ariaLabel: `${text} of batch ${this.id}` });
  }

  async sendCancel() {
    this.show(await call(`batches/${this.id}/cancel`, { method: "POST" }));
  }

  /** Save a file. A link could not send the key. */
  async download(kind, fileId) {
    const response = await fetch(`${ROOT}v1/files/${fileId}/content`, { headers: headers() });
    if (!response.ok) throw await refusal(response);
    const url = URL.createObjectURL(await response.blob());
    Object.assign(document.createElement("a"), { href: url, download: `${this.id}-${kind}.jsonl` }).click();
    // The browser may begin to read after this function has ended.
    setTimeout(() => URL.revokeObjectURL(url), RATE_MS);
  }
}

/** Return the lines per second of a batch that has ended, or null if there is none. */
function meanRate(batch, finished) {
  const endedAt = batch[`${batch.status}_at`];
  return batch.in_progress_at === null ? null : finished / Math.max(1, endedAt - batch.in_progress_at);
}

function span(seconds) {
  if (seconds < 60) return `${Math.ceil(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
