// The parameters of images and videos: a field for each that the chosen model has, with its default.

import { add } from "./elements.js";

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
    const values = Object.fromEntries(this.entries);
    this.painter = painter;
    this.inputs = {};
    this.box.replaceChildren();
    for (const name of painter?.fields ?? []) this.inputs[name] = this.addField(name, values[name] ?? "");
    this.box.hidden = painter === null;
  }

  addField(name, value) {
    const [title, attributes] = FIELDS[name];
    const field = add(this.box, "div", name === "negative_prompt" ? "field wide" : "field");
    const label = add(field, "label", "caption");
    const input = add(field, "input");
    const fault = add(field, "p", "fault");
    Object.assign(label, { textContent: title, htmlFor: `paint-${name}` });
    Object.assign(input, { id: `paint-${name}`, placeholder: this.painter.defaults[name] ?? "", ...attributes, value });
    Object.assign(fault, { id: `fault-${name}`, role: "alert", hidden: true });
    input.setAttribute("aria-describedby", fault.id);
    input.addEventListener("input", () => this.complain(name, ""));
    if (name === "size") {
      const list = add(field, "datalist");
      list.id = "sizes";
      list.append(...this.painter.sizes.map((size) => new Option(size)));
      input.setAttribute("list", list.id);
    }
    return input;
  }

  get entries() {
    return Object.entries(this.inputs).map(([name, input]) => [name, input.value]);
  }

  nameOf(name) {
    return this.painter.kind === "video" ? name : IMAGE_NAMES[name] ?? name;
  }

  /** Return the fields of a request, or null after showing what is wrong. */
  values() {
    for (const [name, input] of Object.entries(this.inputs)) {
      this.complain(name, "");
      if (!input.checkValidity()) return this.complain(name, input.validationMessage);
    }
    const filled = Object.entries(this.inputs).filter(([, input]) => input.value !== "");
    return Object.fromEntries(
      filled.map(([name, input]) => [this.nameOf(name), input.type === "number" ? input.valueAsNumber : input.value]),
    );
  }

  /** Show an error of the server next to its field. */
  refuse({ field, message }) {
    const name = Object.keys(this.inputs).find((name) => this.nameOf(name) === field);
    if (name !== undefined) this.complain(name, message);
  }

  complain(name, text) {
    const input = this.inputs[name];
    const fault = input.parentElement.querySelector(".fault");
    fault.textContent = text;
    fault.hidden = text === "";
    input.ariaInvalid = String(text !== "");
    if (text === "") return null;
    input.closest("details").open = true;
    input.focus();
    return null;
  }
}
