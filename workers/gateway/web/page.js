// The page: sends a question and shows its answer, through the public API alone.

import { Images } from "./images.js";
import { Stages, duration, hasEnded } from "./stages.js";
import { Refused, ask, refusal } from "./stream.js";

const POLL_MS = 150;
const HEALTH_MS = 5000;
// A shorter time is too inexact for a rate of tokens per second.
const MIN_RATE_MS = 200;
const $ = (id) => document.getElementById(id);

const stages = new Stages($("stages"));
const images = new Images($("drop"), $("file"), $("images"));
let running = null;

// -- asking -----------------------------------------------------------------------------------

class Run {
  constructor() {
    this.name = `page-${crypto.getRandomValues(new BigUint64Array(1))[0].toString(16).padStart(16, "0")}`;
    this.abort = new AbortController();
    this.headers = headers();
    this.id = null;
    this.began = performance.now();
    this.first = null;
    this.counted = null; // tokens that arrived with the first event
    this.resumes = 0;
    this.cancelled = false;
    this.over = false;
  }

  async read(body) {
    const chunks = ask(this.name, body, this.headers, this.abort.signal, {
      accepted: (id) => this.accepted(id),
      lost: () => say("Connection lost. Reconnecting"),
      resumed: (after) => this.resumed(after),
    });
    this.watch();
    for await (const chunk of chunks) {
      if (chunk.error) throw new Refused(200, chunk.error);
      this.take(chunk);
    }
  }

  accepted(id) {
    if (this.id !== null) return;
    this.id = id;
    $("request").textContent = id;
    if (!this.cancelled) say("Accepted");
  }

  resumed(after) {
    this.resumes += 1;
    const where = after === null ? "from the beginning" : `after record ${after}`;
    $("resumed").textContent = this.resumes === 1 ? where : `${this.resumes} times, last ${where}`;
    say(`Resumed ${where}`);
  }

  take(chunk) {
    const now = performance.now();
    for (const choice of chunk.choices ?? []) {
      if (!choice.delta?.content) continue;
      if (this.first === null) {
        this.first = now;
        $("first").textContent = duration(now - this.began);
        say("Answering");
      }
      write(choice.index, choice.delta.content);
    }
    if (chunk.usage) this.count(chunk.usage, now);
  }

  count(usage, now) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    $("tokens").textContent = tokens(usage.completion_tokens);
    if (usage.prompt_tokens) {
      $("prompt").textContent = tokens(usage.prompt_tokens) + (cached ? `, ${cached} cached` : "");
    }
    this.counted ??= usage.completion_tokens;
    const more = usage.completion_tokens - this.counted;
    if (more > 0 && now - this.first > MIN_RATE_MS) $("rate").textContent = ((1000 * more) / (now - this.first)).toFixed(1);
  }

  /** Follow the request through the stages, until it has ended. */
  async watch() {
    for (;;) {
      const request = await this.fetchState();
      if (this !== running) return;
      if (request !== null) stages.show(request);
      if (this.abort.signal.aborted || (request === null ? this.over : hasEnded(request.state))) return;
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  /** Return the state of the request, or null when the server does not answer: the stream waits for it. */
  async fetchState() {
    try {
      const response = await fetch(this.address, { headers: this.headers });
      return response.ok ? await response.json() : null;
    } catch {
      return null;
    }
  }

  get address() {
    return `v1/requests/${encodeURIComponent(this.id ?? this.name)}`;
  }

  /** Cancel the request. Its stream then ends with an error that says so. */
  async cancel() {
    this.cancelled = true;
    say("Cancelling");
    const options = { method: "DELETE", headers: this.headers, keepalive: true };
    const done = await fetch(this.address, options).catch(() => null);
    // A server that does not know the request, or does not answer, will not end the stream.
    if (!done?.ok) this.abort.abort(new Error("cancelled"));
  }
}

async function submit() {
  if (running !== null && !running.over) return;
  const body = compose();
  if (body === null) return;
  const run = new Run();
  running = run;
  clear();
  busy(true);
  try {
    await run.read(body);
    say(`Done in ${duration(performance.now() - run.began)}`);
  } catch (error) {
    if (run.cancelled) say("Cancelled");
    else fail(error);
  }
  run.over = true;
  busy(false);
}

/** Return the request's body, or null after showing what is wrong. */
function compose() {
  const question = $("question").value.trim();
  if (question === "") return complain("Write a question first.", $("question"));
  let more = {};
  try {
    more = JSON.parse($("more").value.trim() || "{}");
  } catch (error) {
    return complain(`The parameters are not JSON: ${error.message}`, $("more"));
  }
  if (more === null || typeof more !== "object" || Array.isArray(more)) {
    return complain("The parameters must be one JSON object.", $("more"));
  }
  for (const id of ["max-tokens", "temperature"]) {
    if (!$(id).checkValidity()) return complain($(id).validationMessage, $(id));
  }
  const parts = images.urls.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = parts.length ? [...parts, { type: "text", text: question }] : question;
  return JSON.stringify({
    model: $("model").value,
    messages: [{ role: "user", content }],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    durable: true,
    ...number("max_tokens", $("max-tokens")),
    ...number("temperature", $("temperature")),
    ...more,
  });
}

const number = (name, input) => (input.value === "" ? {} : { [name]: input.valueAsNumber });
const headers = () => ($("key").value ? { Authorization: `Bearer ${$("key").value.trim()}` } : {});
const tokens = (count) => `${count} ${count === 1 ? "token" : "tokens"}`;

// -- showing ----------------------------------------------------------------------------------

function clear() {
  $("answer").replaceChildren();
  $("error").hidden = true;
  for (const id of ["first", "rate", "tokens", "prompt", "request"]) $(id).textContent = "–";
  $("resumed").textContent = "never";
  stages.show(null);
  say("Sending");
  $("status").scrollIntoView({ block: "nearest" });
}

/** Each choice of an answer is a paragraph of its own. */
function write(index, text) {
  while ($("answer").children.length <= index) $("answer").append(document.createElement("p"));
  const box = $("answer");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
  box.children[index].append(text);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

const say = (text) => ($("status").textContent = text);

function busy(isBusy) {
  $("answer").ariaBusy = String(isBusy);
  $("send").disabled = isBusy || $("model").disabled;
  $("cancel").disabled = !isBusy;
}

function fail(error) {
  say("Failed");
  const unreachable = error instanceof TypeError;
  const text = unreachable ? "The server cannot be reached." : error.message;
  const details = [
    error.field && `field ${error.field}`,
    error.code && `code ${error.code}`,
    error.status >= 400 && `status ${error.status}`,
    unreachable && "It may be restarting; ask again in a moment.",
  ].filter(Boolean);
  const lines = [text, details.join(", ")].filter(Boolean).map((line) => {
    const p = document.createElement("p");
    p.textContent = line;
    return p;
  });
  $("error").replaceChildren(...lines);
  $("error").hidden = false;
}

function complain(text, input) {
  fail(new Error(text));
  say("");
  input.closest("details")?.setAttribute("open", "");
  input.focus();
  return null;
}

// -- the server -------------------------------------------------------------------------------

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    offer([], "needs a key");
    $("settings").open = true;
    return;
  }
  if (!response.ok) throw await refusal(response);
  offer((await response.json()).data.map((model) => model.id), "none is served");
}

function offer(names, otherwise) {
  const select = $("model");
  const chosen = select.value;
  select.replaceChildren(...(names.length ? names.map((name) => new Option(name, name)) : [new Option(otherwise, "")]));
  if (names.includes(chosen)) select.value = chosen;
  select.disabled = names.length === 0;
  $("send").disabled = select.disabled || (running !== null && !running.over);
}

async function pollHealth() {
  const health = $("health");
  const show = (state, text) => {
    health.dataset.state = state;
    if (health.textContent !== text) health.textContent = text;
  };
  try {
    const { ok } = await fetch("ready");
    show(ok ? "ready" : "away", ok ? "Ready" : "Not ready");
    if ($("model").disabled) await loadModels();
  } catch {
    show("away", "Not reachable");
  }
  setTimeout(pollHealth, HEALTH_MS);
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!$("send").disabled) $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running !== null && !running.over) running.cancel();
});
$("cancel").addEventListener("click", () => running?.cancel());
$("key").addEventListener("change", () => loadModels().catch(fail));
// The answer has no reader any more. A page restored from the cache shows it as far as it came.
addEventListener("pagehide", () => { if (running !== null && !running.over) running.cancel(); });
pollHealth();
