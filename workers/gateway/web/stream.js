// Reads one answer to its end over any number of connections. Independent of the page.

import { ROOT } from "./elements.js";

const FIRST_PAUSE_MS = 250;
const MAX_PAUSE_MS = 4000;
// After this time without a connection the page gives up.
const MAX_OUTAGE_MS = 120_000;
// Statuses of a restarting server or a full queue. Any other would only come again.
const TRANSIENT = new Set([429, 502, 503]);

/** The server has refused the request. */
export class Refused extends Error {
  constructor(status, error, retryAfterMs = 0) {
    super(error?.message || `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.field = error?.param ?? null;
    this.retryAfterMs = retryAfterMs;
  }
}

/**
 * Post `body` to `path` and yield the answer's events, each once and in order: their chunk and their id.
 *
 * A `body` of null reads a request that was posted before, after its event `last`. A broken connection
 * is opened again after the last event that was read. `listener` has the methods accepted(id),
 * lost(error) and resumed(last event's id or null). Throws Refused, or the reason with which `signal`
 * was aborted.
 */
export async function* ask(path, name, body, headers, signal, listener, last = null) {
  let id = body === null ? name : null;
  let lostAt = body === null ? performance.now() : null;
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    let error;
    try {
      const response = await open(path, name, body, headers, signal, id, last);
      id = response.headers.get("X-Request-Id") ?? id ?? name;
      listener.accepted(id);
      if (lostAt !== null) listener.resumed(last);
      lostAt = null;
      for await (const event of events(response.body)) {
        if (event.data === "[DONE]") return;
        pauseMs = FIRST_PAUSE_MS;
        last = event.id ?? last;
        yield { chunk: JSON.parse(event.data), last };
      }
      error = new Error("The connection ended before the answer was complete.");
    } catch (thrown) {
      if (signal.aborted || !isTransient(thrown)) throw thrown;
      error = thrown;
    }
    lostAt ??= performance.now();
    if (performance.now() - lostAt > MAX_OUTAGE_MS) throw error;
    listener.lost(error);
    await sleep(Math.max(pauseMs, error.retryAfterMs ?? 0), signal);
    pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
  }
}

/** Return the response to a request that may be repeated. A broken connection is opened again. */
export async function fetchAgain(path, options, signal, lost) {
  const beganMs = performance.now();
  for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS)) {
    try {
      const response = await fetch(path, { ...options, signal });
      if (response.ok) return response;
      throw await refusal(response);
    } catch (error) {
      if (signal.aborted || !isTransient(error) || performance.now() - beganMs > MAX_OUTAGE_MS) throw error;
      lost(error);
      await sleep(Math.max(pauseMs, error.retryAfterMs ?? 0), signal);
    }
  }
}

const isTransient = (error) => error instanceof TypeError || TRANSIENT.has(error.status);

async function open(path, name, body, headers, signal, id, last) {
  const from = last === null ? {} : { "Last-Event-ID": last };
  const response = await (id === null
    ? fetch(path, {
        method: "POST",
        headers: {
          ...headers,
          Accept: "text/event-stream", // asks for event ids, from which to resume
          "Content-Type": "application/json",
          "X-Request-Id": name,
        },
        body,
        signal,
      })
    : fetch(`${ROOT}v1/requests/${encodeURIComponent(id)}/stream`, { headers: { ...headers, ...from }, signal }));
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Return the error of a response that is not OK. */
export async function refusal(response) {
  const answer = await response.json().catch(() => null);
  const seconds = Number(response.headers.get("Retry-After"));
  return new Refused(response.status, answer?.error, 1000 * (seconds || 0));
}

/** Yield the server-sent events of a body: their data, and their id or null. */
export async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event.data !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const event = { id: null, data: null };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (line.startsWith("id:")) event.id = value;
    if (line.startsWith("data:")) event.data = event.data === null ? value : `${event.data}\n${value}`;
  }
  return event;
}

export function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => { done(); reject(signal.reason); };
    const timer = setTimeout(() => done(resolve), ms);
    const done = (then) => {
      clearTimeout(timer);
      signal.removeEventListener("abort", stop);
      removeEventListener("online", wake);
      then?.();
    };
    const wake = () => done(resolve);
    signal.addEventListener("abort", stop);
    addEventListener("online", wake);
  });
}
