// One request: reads its answer into a turn and follows it through the stages.

import { ROOT } from "./elements.js";
import { duration, hasEnded, waitOf } from "./stages.js";
import { Refused, ask } from "./stream.js";

const POLL_MS = 150;
const MAX_POLL_MS = 2000;
// The console of a browser reports a request that is not found yet as an error. The page therefore
// waits until the server has answered, or a second and as long as an upload at 4 MB/s takes.
const MAX_UNANSWERED_MS = 1000;
const UPLOAD_BYTES_PER_MS = 4000;
// The longest time for which a cancelled request may be on its way to the broker.
const MAX_ARRIVAL_MS = 10_000;
// Fewer tokens or a shorter time are too inexact for a rate.
const MIN_RATE_TOKENS = 16;
const MIN_RATE_MS = 200;

export class Run {
  path = `${ROOT}v1/chat/completions`;
  done = "Done";

  /** `changed` is called after each change of the turn. `player` is null for an answer that is not spoken. */
  constructor(turn, headers, changed, player = null) {
    this.turn = turn;
    this.player = player;
    this.kept = turn.kept;
    this.headers = headers;
    this.changed = changed;
    this.abort = new AbortController();
    this.error = null; // why the request has failed
    this.first = null;
    this.counted = null; // tokens that arrived with the first event
    this.cancelled = false;
    this.isLeft = false; // for another conversation
    this.over = false;
    this.answered = new Promise((resolve) => { this.tellAnswered = resolve; });
  }

  /** Read the answer to its end. A `body` of null continues a request that was posted before. */
  async read(body) {
    const { id, name, last } = this.kept;
    const listener = {
      accepted: (given) => this.accepted(given),
      lost: () => this.turn.say("Connection lost. Reconnecting"),
      resumed: (after) => this.resumed(after),
    };
    try {
      const events = ask(this.path, id ?? name, body, this.headers, this.abort.signal, listener, last);
      this.watch(body === null ? 0 : MAX_UNANSWERED_MS + body.length / UPLOAD_BYTES_PER_MS);
      for await (const event of events) {
        if (event.chunk.error) throw new Refused(200, event.chunk.error);
        this.kept.last = event.last;
        this.take(event.chunk);
        this.changed();
      }
      this.turn.end("done", `${this.done} in ${duration(Date.now() - this.kept.beganMs)}`);
    } catch (error) {
      this.stop(error);
    }
    this.over = true;
    this.player?.finish();
    this.changed();
  }

  stop(error) {
    if (this.isLeft) return;
    if (this.cancelled) return this.turn.end("cancelled", "Cancelled");
    // After a reload the page has no key any more. The request continues without it.
    if (error.status === 401 && this.kept.id !== null) return this.turn.say("Enter the API key to continue");
    this.error = error;
    this.turn.fail(explain(error));
    this.turn.end("failed", "Failed");
  }

  accepted(id) {
    this.tellAnswered();
    if (this.kept.id === null && !this.cancelled) this.turn.say("Waiting for the first token");
    this.turn.accepted(id);
    this.changed();
  }

  resumed(after) {
    const where = after === null ? "from the beginning" : `after record ${after}`;
    this.kept.resumes += 1;
    this.turn.fact("resumed", this.kept.resumes === 1 ? where : `${this.kept.resumes} times, last ${where}`);
    this.turn.say(`Resumed ${where}`);
  }

  take(chunk) {
    const now = performance.now();
    for (const choice of chunk.choices ?? []) {
      if (choice.delta?.audio) this.speak(choice.delta.audio);
      if (!choice.delta?.content) continue;
      if (this.first === null) {
        this.first = now;
        if (!("first" in this.kept.facts)) this.turn.fact("first", duration(Date.now() - this.kept.beganMs));
        if (!this.cancelled) this.turn.say("Answering");
      }
      this.turn.write(choice.index, choice.delta.content);
    }
    if (chunk.usage) this.count(chunk.usage, now);
  }

  speak(audio) {
    if (audio.error) this.turn.remark(`The speech is cut: ${audio.error.message}`);
    if (!audio.data || this.player === null) return;
    this.player.add(audio.data);
    this.turn.fact("speech", `${this.player.seconds.toFixed(1)} s`);
  }

  count(usage, now) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const written = usage.completion_tokens_details?.text_tokens ?? usage.completion_tokens;
    this.turn.fact("tokens", tokens(written));
    if (usage.prompt_tokens) {
      this.turn.fact("prompt", tokens(usage.prompt_tokens) + (cached ? `, ${cached} cached` : ""));
    }
    this.counted ??= written;
    const more = written - this.counted;
    const tookMs = now - this.first;
    if (more >= MIN_RATE_TOKENS && tookMs > MIN_RATE_MS) this.turn.fact("rate", ((1000 * more) / tookMs).toFixed(1));
  }

  /** Follow the request through the stages, until it has ended. */
  async watch(maxPauseMs) {
    await Promise.race([this.answered, sleep(maxPauseMs)]);
    for (let pause = POLL_MS; !this.abort.signal.aborted; ) {
      const request = await this.fetchState();
      if (request !== null) {
        this.turn.showStages(request);
        if (this.turn.busy && this.turn.isEmpty && !this.cancelled) this.turn.say(waitOf(request));
        this.changed();
      }
      if (request === null ? this.over : hasEnded(request.state)) return;
      pause = request === null ? Math.min(2 * pause, MAX_POLL_MS) : POLL_MS;
      await sleep(pause);
    }
  }

  /** Return the state of the request, or null when the server does not answer. */
  async fetchState() {
    try {
      const response = await fetch(this.address, { headers: this.headers });
      return response.ok ? await response.json() : null;
    } catch {
      return null;
    }
  }

  get address() {
    return `${ROOT}v1/requests/${encodeURIComponent(this.kept.id ?? this.kept.name)}`;
  }

  /** Stop reading the answer, which continues without this page. */
  leave() {
    this.isLeft = true;
    this.player?.stop();
    this.abort.abort(new Error("left"));
  }

  /** Cancel the request. Its stream then ends with an error that says so. */
  async cancel() {
    this.cancelled = true;
    this.player?.stop();
    this.turn.say("Cancelling");
    if (await this.sendCancel()) return;
    // A server that does not know the request, or does not answer, will not end the stream.
    this.abort.abort(new Error("cancelled"));
    // It may have received the request and not recorded it yet. A durable request would run on.
    const until = performance.now() + MAX_ARRIVAL_MS;
    for (let pause = POLL_MS; performance.now() < until; pause = Math.min(2 * pause, MAX_POLL_MS)) {
      await sleep(pause);
      if (await this.sendCancel()) return;
    }
  }

  /** Return whether the server has stored the cancellation. */
  async sendCancel() {
    const options = { method: "DELETE", headers: this.headers, keepalive: true };
    const response = await fetch(this.address, options).catch(() => null);
    return response?.ok ?? false;
  }
}

/** Return an error as lines of text. */
export function explain(error) {
  const unreachable = error instanceof TypeError;
  const details = [
    error.field && `field ${error.field}`,
    error.code && `code ${error.code}`,
    error.status >= 400 && `status ${error.status}`,
    unreachable && "It may be restarting; ask again in a moment.",
  ].filter(Boolean);
  const hint = error.code === "context_length_exceeded" && "A new conversation starts with an empty context.";
  const text = unreachable ? "The server cannot be reached." : error.message;
  return [text, details.join(", "), hint].filter(Boolean);
}

const tokens = (count) => `${count} ${count === 1 ? "token" : "tokens"}`;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
