// One request for an image: reads its previews, and then the image itself, into a turn.

import { Run } from "./run.js";

const PREVIEWS = 6;

/** Return the body of a request for an image. */
export const bodyOf = (model, prompt, more) =>
  JSON.stringify({ model, prompt, stream: true, partial_images: PREVIEWS, durable: true, ...more });

export class Painting extends Run {
  path = "v1/images/generations";
  done = "Painted";

  take({ type, b64_json: file, partial_image_index: index }) {
    this.turn.paint(`data:image/png;base64,${file}`);
    if (type !== "image_generation.completed") this.turn.say(`Preview ${index + 1} of ${PREVIEWS}`);
  }
}
