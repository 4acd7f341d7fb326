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
    const hops = request?.path ?? [];
    const began = Math.min(...hops.map((hop) => hop.began_ms));
    const ended = Math.max(...hops.map((hop) => hop.ended_ms ?? request.now_ms));
    for (const row of this.rows) {
      const mine = hops.filter((hop) => hop.stage === row.name);
      const [state, time, note] = describe(row, mine, request, hops);
      row.row.dataset.state = state;
      row.time.textContent = time;
      row.text.textContent = note;
      row.bar.hidden = mine.length === 0;
      if (mine.length === 0) continue;
      const whole = Math.max(ended - began, 1);
      const last = mine.at(-1);
      const until = last.ended_ms ?? request.now_ms;
      row.bar.style.left = `${(100 * (last.began_ms - began)) / whole}%`;
      row.bar.style.width = `${(100 * (until - last.began_ms)) / whole}%`;
    }
  }
}

function describe(row, mine, request, hops) {
  const last = mine.at(-1);
  const ended = request !== null && hasEnded(request.state);
  if (last === undefined) {
    if (row.name === "encoder" && hops.some((hop) => hop.stage === "engine")) {
      return ["aside", "in the engine", row.note];
    }
    const waits = request !== null && !ended && request.stage === row.name;
    return waits ? ["active", "waiting", row.note] : ["idle", "", row.note];
  }
  const attempt = last.attempt > 1 ? `, attempt ${last.attempt}` : "";
  const note = `${row.note}${attempt}`;
  const took = duration((last.ended_ms ?? request.now_ms) - last.began_ms);
  if (last.ended_ms === null) {
    return [ended ? "failed" : "active", ended ? request.state : took, note];
  }
  const failed = request.state === "failed" && last === hops.at(-1);
  return [failed ? "failed" : "done", took, note];
}

function add(parent, tag, name = "") {
  const child = parent.appendChild(document.createElement(tag));
  child.className = name;
  return child;
}
