// The parameters of images and videos: a field for each that the chosen model has, with its default.

import { add, clearFault, complain } from "./elements.js";

const FIELDS = {
  size: ["Size", { autocomplete: "off" }],
  n: ["Images", { type: "number", min: 1, max: 10 }],
  seconds: ["Seconds", { type: "number", min: 0, max: 9999, step: "any" }],
  steps: ["Steps", { type: "number", min: 1, max: 200 }],
  guidance: ["Guidance", { type: "number", min: 0, max: 50, step: "any" }],
  seed: ["Seed", { type: "number", min: 0, max: Number.MAX_SAFE_INTEGER, placeholder: "random" }],
  negative_prompt: ["Negative prompt", { maxLength: 4096 }],
};
// Names of fields in requests for images, where they differ.
const IMAGE_NAMES = { steps: "num_inference_steps", guidance: "guidance_scale" };

export class Parameters {
  constructor(box) {
    this.box = box;
    this.inputs = {};
    this.painter = null;
  }

  /** Show the fields of a painter, which keep their values, or none for null. */
  show(painter) {
    const values = Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value]));
    this.painter = painter;
    this.inputs = {};
    this.box.replaceChildren();
    for (const name of painter?.fields ?? []) this.inputs[name] = this.addField(name, values[name] ?? "");
    this.box.hidden = painter === null;
  }

  addField(name, value) {
    const [title, attributes] = FIELDS[name];
    const field = add(this.box, "div", name === "negative_prompt" ? "field wide" : "field");
    const id = `paint-${name}`;
    add(field, "label", "caption", { textContent: title, htmlFor: id });
    const input = add(field, "input", "", { id, placeholder: this.painter.defaults[name] ?? "", ...attributes, value });
    if (name === "size") {
      const list = add(field, "datalist", "", { id: "sizes" });
      list.append(...this.painter.sizes.map((size) => new Option(size)));
      input.setAttribute("list", list.id);
    }
    return input;
  }

  nameOf(name) {
    return this.painter.kind === "video" ? name : IMAGE_NAMES[name] ?? name;
  }

  /** Return the fields of a request, or null after showing what is wrong. */
  values() {
    for (const input of Object.values(this.inputs)) {
      clearFault(input);
      if (!input.checkValidity()) return complain(input.validationMessage, input);
    }
    const filled = Object.entries(this.inputs).filter(([, input]) => input.value !== "");
    return Object.fromEntries(
      filled.map(([name, input]) => [this.nameOf(name), input.type === "number" ? input.valueAsNumber : input.value]),
    );
  }

  /** Return the input of a field of requests, or undefined. */
  find(field) {
    return Object.entries(this.inputs).find(([name]) => this.nameOf(name) === field)?.[1];
  }
}
