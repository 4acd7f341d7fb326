// One request for images: reads their previews, and then the images themselves, into a turn.

import { ROOT } from "./elements.js";
import { Run } from "./run.js";

const PREVIEWS = 6;

/** Return the body of a request for images, or for edits of `images`. */
export function bodyOf(model, prompt, images, fields) {
  const edited = images.length ? { images: images.map(({ url }) => ({ image_url: url })) } : {};
  return JSON.stringify({ model, prompt, ...edited, stream: true, partial_images: PREVIEWS, durable: true, ...fields });
}

export class Painting extends Run {
  path = `${ROOT}v1/images/generations`;
  done = "Painted";

  take({ type, b64_json: file, image_index: image, partial_image_index: preview }) {
    this.turn.paint(`data:image/png;base64,${file}`, image);
    const which = image > 0 ? ` of image ${image + 1}` : "";
    if (!type.endsWith(".completed")) this.turn.say(`Preview ${preview + 1} of ${PREVIEWS}${which}`);
  }
}

export class Editing extends Painting {
  path = `${ROOT}v1/images/edits`;
}
