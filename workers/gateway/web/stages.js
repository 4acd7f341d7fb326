import { add } from "./elements.js";
import { STAGES } from "./pipeline.js";

// The stages of a request, as GET /v1/requests/{id} reports them: a list with workers and times.

const BESIDE = new Set(["encoder", "prefill"]);
const ENDED = new Set(["finished", "failed", "cancelled"]);

export const hasEnded = (state) => ENDED.has(state);

/** Return a time as text: below a second in milliseconds, otherwise in seconds. */
export function duration(ms) {
  if (ms < 9.95) return `${Math.max(ms, 0).toFixed(1)} ms`;
  return ms < 999.5 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(ms < 99_950 ? 1 : 0)} s`;
}

/** Draws the stages into an ordered list. `show(null)` draws them without a request. */
export class Stages {
  constructor(list) {
    this.rows = STAGES.map(([name, title, does]) => {
      const row = list.appendChild(document.createElement("li"));
      row.title = does;
      const head = add(row, "div", "stage-head");
      add(head, "span").textContent = title;
      const worker = add(head, "span", "worker");
      const time = add(head, "span", "time");
      const bar = add(add(row, "div", "track"), "i");
      return { name, row, time, worker, bar };
    });
    this.show(null);
  }

  /** Show a request, given as the API's answer. All its times come from one clock, the broker's. */
  show(request) {
    const entries = request?.path ?? [];
    const ended = request !== null && hasEnded(request.state);
    const endOf = (entry) => entry.ended_ms ?? (ended ? entry.began_ms : request.now_ms);
    const began = Math.min(...entries.map((entry) => entry.began_ms));
    const whole = Math.max(1, ...entries.map((entry) => endOf(entry) - began));
    const reached = STAGES.findLastIndex(([name]) => entries.some((entry) => entry.stage === name));
    this.rows.forEach((row, at) => {
      const entry = entries.findLast((other) => other.stage === row.name);
      const passed = at < reached;
      const [state, time] = entry === undefined
        ? describeOther(row, request, passed, ended)
        : describe(entry, request, endOf(entry) - entry.began_ms, passed, ended);
      // Engines may encode images and compute prompts themselves: these stages have no entry then.
      row.row.hidden = BESIDE.has(row.name) && entry === undefined;
      row.row.dataset.state = state;
      row.time.textContent = time;
      row.worker.textContent = entry === undefined ? "" : entry.worker;
      if (entry?.attempt > 1) row.worker.textContent = `attempt ${entry.attempt}, ${entry.worker}`;
      row.worker.title = row.worker.textContent;
      row.bar.hidden = entry === undefined;
      if (entry === undefined) return;
      row.bar.style.left = `${(100 * (entry.began_ms - began)) / whole}%`;
      row.bar.style.width = `${(100 * (endOf(entry) - entry.began_ms)) / whole}%`;
    });
  }
}

function describe(entry, request, tookMs, passed, ended) {
  if (entry.ended_ms === null) {
    if (!ended) return ["active", duration(tookMs)];
    return passed ? ["done", ""] : ["failed", request.state];
  }
  return [request.state === "failed" && !passed ? "failed" : "done", duration(tookMs)];
}

/** Describe a stage that has not claimed the request. */
function describeOther(row, request, passed, ended) {
  if (passed) return ["done", ""];
  const waits = request !== null && !ended && request.stage === row.name;
  return waits ? ["active", request.waits_for ?? "waiting"] : ["idle", ""];
}
