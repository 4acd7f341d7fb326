// One turn of the conversation: what was asked, its answer, and the path of its request.

import { add, addButton, addCopy, newElement, showLines } from "./elements.js";
import { enlargeable } from "./frame.js";
import { Markdown } from "./markdown.js";
import { partOf, viewOf } from "./media.js";
import { drawStages, duration } from "./stages.js";

const FACTS = [
  ["first", "First token"],
  ["rate", "Tokens per second"],
  ["tokens", "Answer"],
  ["prompt", "Prompt"],
  ["speech", "Speech"],
  ["resumed", "Resumed"],
];

/** Return the part of a turn that is stored: plain values. */
export function newTurn(question, images, kind) {
  return {
    question,
    kind, // the kind of the answer: text, image, edit or video
    images: images.map(({ name, size, kind }) => ({ name, size, kind })),
    state: "running", // or done, failed, cancelled
    name: `page-${crypto.getRandomValues(new BigUint64Array(1))[0].toString(16).padStart(16, "0")}`,
    id: null,
    last: null, // the id of the last event whose text is in `texts`
    texts: [],
    status: "Sending",
    error: [],
    facts: {},
    request: null,
    beganMs: Date.now(),
    resumes: 0,
  };
}

/**
 * Shows a turn. `files` has the URLs of the question's images and of the painted ones; it is null where
 * they are no longer stored. `acts` has the functions edit(turn) and retry(turn).
 */
export class Turn {
  constructor(number, kept, files, acts) {
    this.number = number;
    this.kept = kept;
    this.acts = acts;
    this.urls = files?.urls ?? (kept.images.length ? null : []);
    this.painted = []; // the URLs of the images of the answer
    this.writers = [];
    this.paintings = [];
    this.element = newElement("article", "turn", { ariaLabel: `Question ${number + 1}` });
    this.element.append(this.askedPart(), this.answerPart());
    files?.painted.forEach((url, index) => this.paint(url, index));
    kept.texts.forEach((text, index) => this.writerOf(index).write(text));
    this.busy = kept.state === "running";
    this.say(kept.status);
    Object.entries(kept.facts).forEach(([name, text]) => this.fact(name, text));
    this.request.textContent = kept.id ?? kept.name;
    if (kept.request !== null) this.showStages(kept.request);
    if (kept.error.length) this.fail(kept.error);
    const isPainted = ["image", "edit"].includes(kept.kind) && kept.state === "done";
    if (this.urls === null) this.remark("The images of this question are no longer stored, and are not sent again.");
    else if (files === null && isPainted) this.remark("The images of this answer are no longer stored.");
    if (!this.busy) this.end(kept.state, kept.status);
  }

  /** Return the messages that later requests are sent with. A turn without an answer has none. */
  get messages() {
    const text = this.kept.texts[0] ?? "";
    if (this.busy || text.trim() === "") return [];
    return [{ role: "user", content: this.content }, { role: "assistant", content: text }];
  }

  get content() {
    const images = this.files.map((file) => partOf(file, file.url));
    return images.length ? [...images, { type: "text", text: this.kept.question }] : this.kept.question;
  }

  /** Return the files of the question that are still known: name, size, kind and URL. */
  get files() {
    return (this.urls ?? []).map((url, at) => ({ ...this.kept.images[at], url }));
  }

  // -- changes that a request makes ------------------------------------------------------------

  accepted(id) {
    this.kept.id = id;
    this.request.textContent = id;
  }

  write(index, text) {
    while (this.kept.texts.length <= index) this.kept.texts.push("");
    this.kept.texts[index] += text;
    this.writerOf(index).write(text);
  }

  /** Show an image, or a preview of it, in the place of the one before. */
  paint(url, index) {
    while (this.paintings.length <= index) {
      const image = newElement("img", "painted", { alt: `Painted: ${this.kept.question}` });
      this.paintings.push(image);
      this.painted.push("");
      this.text.append(enlargeable(image));
    }
    this.painted[index] = url;
    if (url) this.paintings[index].src = url;
  }

  /** Show how much of a video is made, in percent. */
  progress(percent) {
    this.bar ??= add(this.text, "progress", "", { max: 100, ariaLabel: "Progress of the video" });
    this.bar.value = percent;
    this.say(`Making the video: ${percent} %`);
  }

  film(url) {
    const video = newElement("video", "painted", { src: url, controls: true, loop: true });
    video.ariaLabel = `Video: ${this.kept.question}`;
    this.text.replaceChildren(video);
  }

  /** Whether a reload has forgotten the video. */
  get lacksVideo() {
    return this.kept.kind === "video" && this.kept.state === "done" && this.isEmpty;
  }

  fact(name, text) {
    this.kept.facts[name] = text;
    this.facts[name].textContent = text;
    this.facts[name].parentElement.hidden = false;
  }

  say(text) {
    this.kept.status = text;
    if (this.status.textContent !== text) this.status.textContent = text;
  }

  showStages(request) {
    const { state, stage, path, now_ms, waits_for } = request;
    this.kept.request = { state, stage, path, now_ms, waits_for };
    const line = drawStages(this.stages, this.kept.request);
    this.line.textContent = line || "Timeline";
    const last = path.at(-1);
    if (last) this.whole.textContent = ` · ${duration((last.ended_ms ?? now_ms) - path[0].began_ms)} in all`;
  }

  fail(lines) {
    this.kept.error = lines;
    showLines(this.error, lines);
  }

  end(state, status) {
    this.kept.state = state;
    this.busy = false;
    this.say(status);
    this.bar?.remove();
    this.copy.hidden = this.kept.texts.length === 0;
    if (this.messages.length === 0 && this.kept.kind === "text") this.remark("This question has no answer, and later ones are sent without it.");
  }

  remark(text) {
    add(this.notes, "p", "hint", { textContent: text });
  }

  /** Whether there is nothing of the answer yet. */
  get isEmpty() {
    return this.text.childElementCount === 0;
  }

  set busy(isBusy) {
    this.text.ariaBusy = String(isBusy);
    this.element.dataset.state = this.kept.state;
  }

  get busy() {
    return this.text.ariaBusy === "true";
  }

  // -- elements --------------------------------------------------------------------------------

  askedPart() {
    const asked = newElement("div", "asked");
    const box = add(asked, "div", "bubble");
    const list = newElement("ul", "thumbs", { ariaLabel: "Images of the question" });
    this.kept.images.forEach(({ name }, at) => {
      const item = add(list, "li");
      if (this.urls === null) item.textContent = name;
      else item.append(framed(viewOf(this.urls[at], name)));
    });
    if (this.kept.images.length) box.append(list);
    add(box, "p", "question", { textContent: this.kept.question });
    addButton(add(asked, "p", "acts"), "Edit", () => this.acts.edit(this)).ariaLabel = `Edit question ${this.number + 1}`;
    return asked;
  }

  answerPart() {
    const answer = newElement("section", "answer", { ariaLabel: `Answer ${this.number + 1}` });
    this.text = add(answer, "div", "text", { ariaLive: "polite" });
    this.error = add(answer, "div", "error", { role: "alert", hidden: true });
    this.notes = add(answer, "div", "notes");
    const foot = add(answer, "div", "foot");
    this.status = add(foot, "p", "status", { role: "status" });
    this.request = add(foot, "code", "request");
    const acts = add(foot, "p", "acts");
    this.copy = addCopy(acts, "Copy", () => this.kept.texts.join("\n\n"), this.text);
    this.copy.ariaLabel = "Copy the answer";
    this.copy.hidden = true;
    const retry = addButton(acts, "Retry", () => this.acts.retry(this), "quiet small retry");
    retry.ariaLabel = `Retry question ${this.number + 1}`;
    answer.append(this.timelinePart());
    return answer;
  }

  timelinePart() {
    const timeline = newElement("details", "timeline");
    const summary = add(timeline, "summary");
    this.line = add(summary, "span", "line", { textContent: "Timeline" });
    this.whole = add(summary, "span", "whole");
    this.stages = add(timeline, "ol", "stages", { ariaLabel: "Stages of the request" });
    const facts = add(timeline, "dl", "facts");
    this.facts = {};
    for (const [name, title] of FACTS) {
      const row = add(facts, "div", "", { hidden: true });
      add(row, "dt", "", { textContent: title });
      this.facts[name] = add(row, "dd", name);
    }
    addCopy(timeline, "Copy id", () => this.kept.id ?? this.kept.name, this.request).classList.add("copy");
    return timeline;
  }

  /** Each choice of an answer is shown by itself. */
  writerOf(index) {
    while (this.writers.length <= index) this.writers.push(new Markdown(add(this.text, "div", "choice")));
    return this.writers[index];
  }
}

const framed = (view) => (view.tagName === "IMG" ? enlargeable(view) : view);
