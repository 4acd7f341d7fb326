// One request for an image: reads its previews, and then the image itself, into a turn.

import { explain } from "./run.js";
import { duration } from "./stages.js";
import { Refused, events, refusal } from "./stream.js";

const PREVIEWS = 6;

/** Return the body of a request for an image. */
export const bodyOf = (model, prompt, more) =>
  JSON.stringify({ model, prompt, stream: true, partial_images: PREVIEWS, ...more });

/** Has the parts of a Run that the page uses. A request for an image ends with its connection. */
export class Painting {
  /** `changed` is called after each change of the turn. */
  constructor(turn, headers, changed) {
    this.turn = turn;
    this.headers = headers;
    this.changed = changed;
    this.abort = new AbortController();
    this.over = false;
  }

  async read(body) {
    try {
      await this.paint(body);
      this.turn.end("done", `Painted in ${duration(Date.now() - this.turn.kept.beganMs)}`);
    } catch (error) {
      if (this.abort.signal.aborted) this.turn.end("cancelled", "Cancelled");
      else {
        this.turn.fail(explain(error));
        this.turn.end("failed", "Failed");
      }
    }
    this.over = true;
    this.changed();
  }

  async paint(body) {
    const response = await fetch("v1/images/generations", {
      method: "POST",
      headers: { ...this.headers, "Content-Type": "application/json" },
      body,
      signal: this.abort.signal,
    });
    if (!response.ok) throw await refusal(response);
    this.turn.accepted(response.headers.get("X-Request-Id"));
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") break;
      const { error, type, b64_json: file, partial_image_index: index } = JSON.parse(data);
      if (error) throw new Refused(200, error);
      this.turn.paint(`data:image/png;base64,${file}`);
      if (type === "image_generation.completed") return;
      this.turn.say(`Preview ${index + 1} of ${PREVIEWS}`);
      this.changed();
    }
    throw new Error("The connection ended before the image was complete.");
  }

  cancel() {
    this.turn.say("Cancelling");
    this.abort.abort(new Error("cancelled"));
  }
}
