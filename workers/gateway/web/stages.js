// The stages of a request, as GET /v1/requests/{id} reports them: a line, and a list with workers and times.

import { add } from "./elements.js";
import { STAGES } from "./pipeline.js";

const ENDED = new Set(["finished", "failed", "cancelled"]);

export const hasEnded = (state) => ENDED.has(state);

/** Return a time as text: below a second in milliseconds, otherwise in seconds. */
export function duration(ms) {
  if (ms < 9.95) return `${Math.max(ms, 0).toFixed(1)} ms`;
  return ms < 999.5 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(ms < 99_950 ? 1 : 0)} s`;
}

/** Draw the stages that a request has reached into a list. Return them as one line of text. */
export function drawStages(list, request) {
  const { path, state, now_ms: nowMs } = request;
  const ended = hasEnded(state);
  const endOf = (entry) => entry.ended_ms ?? (ended ? entry.began_ms : nowMs);
  const began = Math.min(...path.map((entry) => entry.began_ms));
  const whole = Math.max(1, ...path.map((entry) => endOf(entry) - began));
  // Stages that a request does not use have no entry.
  const reached = STAGES.map(([name, title, does]) => {
    const entry = path.findLast((other) => other.stage === name);
    return { name, title, does, entry };
  }).filter(({ name, entry }) => entry !== undefined || (!ended && request.stage === name));
  const texts = reached.map(({ title, does, entry }, at) => {
    const isLast = at === reached.length - 1;
    const [look, time] = entry === undefined
      ? ["active", request.waits_for ?? "waiting"]
      : describe(entry, request, endOf(entry) - entry.began_ms, !isLast, ended);
    const row = at < list.children.length ? list.children[at] : add(list, "li");
    row.replaceChildren();
    Object.assign(row, { title: does }).dataset.state = look;
    const head = add(row, "div", "stage-head");
    add(head, "span", "", { textContent: title });
    const attempt = entry?.attempt > 1 ? `attempt ${entry.attempt}, ` : "";
    const worker = attempt + (entry?.worker ?? "");
    add(head, "span", "worker", { textContent: worker, title: worker });
    add(head, "span", "time", { textContent: time });
    const bar = add(add(row, "div", "track"), "i");
    if (entry !== undefined) {
      bar.style.left = `${(100 * (entry.began_ms - began)) / whole}%`;
      bar.style.width = `${(100 * (endOf(entry) - entry.began_ms)) / whole}%`;
    }
    return `${title} ${time}`.trim();
  });
  while (list.children.length > reached.length) list.lastElementChild.remove();
  return texts.join(" · ");
}

function describe(entry, request, tookMs, passed, ended) {
  if (entry.ended_ms === null) {
    if (!ended) return ["active", duration(tookMs)];
    return passed ? ["done", ""] : ["failed", request.state];
  }
  return [request.state === "failed" && !passed ? "failed" : "done", duration(tookMs)];
}

/** Return as text what a request without an answer waits for. */
export function waitOf({ state, stage, waits_for: reason }) {
  const title = STAGES.find(([name]) => name === stage)?.[1] ?? "a stage";
  if (state !== "queued") return `${title} is working`;
  return [`Waiting for ${title}`, reason].filter(Boolean).join(": ");
}
