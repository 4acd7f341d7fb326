// Examples for an empty conversation, by the abilities of the chosen model. Their images are drawn here.

import { $, add, addButton } from "./elements.js";

const [WIDTH, HEIGHT] = [112, 84];

const DRAWINGS = {
  "yellow star": (pen) => fill(pen, "#000", "#ffd800", star),
  "blue circle": (pen) => fill(pen, "#fff", "#1440d8", (path) => path.arc(56, 42, 28, 0, 2 * Math.PI)),
  "three squares": (pen) => fill(pen, "#fff", "#7a1fa2", (path) => [10, 46, 82].forEach((x) => path.rect(x, 32, 20, 20))),
};

function fill(pen, ground, color, draw) {
  pen.fillStyle = ground;
  pen.fillRect(0, 0, WIDTH, HEIGHT);
  const path = new Path2D();
  draw(path);
  pen.fillStyle = color;
  pen.fill(path);
}

function star(path) {
  for (let corner = 0; corner < 10; corner += 1) {
    const [angle, radius] = [(Math.PI * corner) / 5, corner % 2 ? 13 : 32];
    path.lineTo(56 + radius * Math.sin(angle), 42 - radius * Math.cos(angle));
  }
}

/** Return a drawing as a file. */
async function draw(name) {
  const canvas = Object.assign(document.createElement("canvas"), { width: WIDTH, height: HEIGHT });
  DRAWINGS[name](canvas.getContext("2d"));
  const blob = await new Promise((done) => canvas.toBlob(done));
  return new File([blob], `${name}.png`);
}

/** Return the examples for a model: a question, and the name of a drawing or null. */
function examplesFor({ painter, files, toy }) {
  if (painter?.input_images) return [["Turn the circle red.", "blue circle"]];
  if (painter) return [["a red circle on blue", null], ["three green stars on white", null]];
  const seen = files.includes("image")
    ? [["Describe the image.", "yellow star"], ["How many shapes are there?", "three squares"]]
    : [];
  if (toy) return seen.length ? [...seen, ["What can you do?", null]] : [];
  return [...seen, ["What can you do?", null], ["Compare three sorting algorithms in a table.", null]];
}

/** Show the examples of a model. `ask` is called with the question and the files of a chosen one. */
export function showExamples(name, model, ask) {
  $("greeting").textContent = model.toy ? `${name} is a toy model` : `Ask ${name}`;
  $("about").textContent = model.toy
    ? "It comes with Pagemill to show how requests run, and knows little more than shapes, colors, letters and digits. Serve a model of your own for real answers."
    : "Each answer appears here, with the path of its request through Pagemill.";
  $("examples").replaceChildren();
  for (const [text, drawing] of examplesFor(model)) {
    const button = addButton($("examples"), text, async () => ask(text, drawing ? [await draw(drawing)] : []), "quiet");
    if (drawing) add(button, "small", "", { textContent: `with a drawing: ${drawing}` });
  }
}
