// One video: it is made in the background, so its progress is polled, and its file is loaded at the end.

import { ROOT } from "./elements.js";
import { Run } from "./run.js";
import { duration } from "./stages.js";
import { Refused, fetchAgain, sleep } from "./stream.js";

const POLL_MS = 500;

export class Filming extends Run {
  path = `${ROOT}v1/videos`;

  /** Make the video, and show it. A `body` of null continues a video that was ordered before. */
  async read(body) {
    try {
      if (body !== null) {
        const headers = { "Content-Type": "application/json", "X-Request-Id": this.kept.name };
        await this.fetch(this.path, { method: "POST", body, headers });
      }
      this.accepted(this.kept.name);
      this.watch(0);
      for (;;) {
        const { status, progress, error } = await (await this.fetch(this.video)).json();
        if (error) throw new Refused(200, error);
        this.turn.progress(progress);
        if (status === "completed") break;
        await sleep(POLL_MS, this.abort.signal);
      }
      await this.load();
      this.turn.end("done", `Made in ${duration(Date.now() - this.kept.beganMs)}`);
    } catch (error) {
      this.stop(error);
    }
    this.over = true;
    this.changed();
  }

  /** Show the file of a video that is complete. The page does not keep it across a reload. */
  async load() {
    const file = await (await this.fetch(`${this.video}/content`)).blob();
    this.turn.film(URL.createObjectURL(file));
  }

  get video() {
    return `${this.path}/${encodeURIComponent(this.kept.name)}`;
  }

  fetch(path, options = {}) {
    const headers = { ...this.headers, ...options.headers };
    return fetchAgain(path, { ...options, headers }, this.abort.signal, () =>
      this.turn.say("Connection lost. Reconnecting"),
    );
  }
}
