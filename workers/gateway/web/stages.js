// The request's way: what GET /v1/requests/{id} tells, as a list with times.

const STAGES = [
  ["coordinator", "Coordinator", "checks it and plans its way"],
  ["renderer", "Renderer", "text and pictures become tokens"],
  ["encoder", "Encoder", "pictures become embeddings"],
  ["engine", "Engine", "writes the answer"],
];
const ENDED = new Set(["finished", "failed", "cancelled"]);

export const hasEnded = (state) => ENDED.has(state);

/** Times below a second in milliseconds, others in seconds. */
export function duration(ms) {
  if (ms < 9.95) return `${Math.max(ms, 0).toFixed(1)} ms`;
  return ms < 999.5 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(ms < 99_950 ? 1 : 0)} s`;
}

/** Draws into an ordered list. `show(null)` is for no request. */
export class Stages {
  constructor(list) {
    this.rows = STAGES.map(([name, title, note]) => {
      const row = list.appendChild(document.createElement("li"));
      const head = add(row, "div", "stage-head");
      add(head, "span").textContent = title;
      const time = add(head, "span");
      const text = add(row, "p", "stage-note");
      const bar = add(add(row, "div", "track"), "i");
      return { name, note, row, time, text, bar };
    });
    this.show(null);
  }

  /** `request`: the API's answer. Times in it are of one clock, the broker's. */
  show(request) {
    const stops = request?.path ?? [];
    const ended = request !== null && hasEnded(request.state);
    const endOf = (stop) => stop.ended_ms ?? (ended ? stop.began_ms : request.now_ms);
    const began = Math.min(...stops.map((stop) => stop.began_ms));
    const whole = Math.max(1, ...stops.map((stop) => endOf(stop) - began));
    const reached = STAGES.findLastIndex(([name]) => stops.some((stop) => stop.stage === name));
    this.rows.forEach((row, at) => {
      const stop = stops.findLast((other) => other.stage === row.name);
      const passed = at < reached;
      const [state, time] = stop === undefined
        ? describeOther(row, request, passed, ended)
        : describe(stop, request, endOf(stop) - stop.began_ms, passed, ended);
      // Engines may do its work themselves, and then tell nothing of it.
      row.row.hidden = row.name === "encoder" && stop === undefined;
      row.row.dataset.state = state;
      row.time.textContent = time;
      row.text.textContent = row.note + (stop?.attempt > 1 ? `, attempt ${stop.attempt}` : "");
      row.bar.hidden = stop === undefined;
      if (stop === undefined) return;
      row.bar.style.left = `${(100 * (stop.began_ms - began)) / whole}%`;
      row.bar.style.width = `${(100 * (endOf(stop) - stop.began_ms)) / whole}%`;
    });
  }
}

function describe(stop, request, tookMs, passed, ended) {
  if (stop.ended_ms === null) {
    if (!ended) return ["active", duration(tookMs)];
    return passed ? ["done", ""] : ["failed", request.state];
  }
  return [request.state === "failed" && !passed ? "failed" : "done", duration(tookMs)];
}

/** Of a stage that has not had it. */
function describeOther(row, request, passed, ended) {
  if (passed) return ["done", ""];
  const waits = request !== null && !ended && request.stage === row.name;
  return waits ? ["active", "waiting"] : ["idle", ""];
}

function add(parent, tag, name = "") {
  const child = parent.appendChild(document.createElement(tag));
  child.className = name;
  return child;
}
