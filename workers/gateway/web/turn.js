// One turn of the conversation: what was asked, its answer, and the path of its request.

import { add, newElement, showLines } from "./elements.js";
import { partOf, viewOf } from "./media.js";
import { Stages, duration } from "./stages.js";
import { TextWriter } from "./text.js";

const FACTS = [
  ["first", "First token"],
  ["rate", "Tokens per second"],
  ["tokens", "Answer"],
  ["prompt", "Prompt"],
  ["speech", "Speech"],
  ["resumed", "Resumed"],
];
const COPIED_MS = 2000;
// On such a screen the timeline does not fit beside the answer.
const NARROW = matchMedia("(max-width: 56rem)");

/** Return the part of a turn that is stored: plain values. */
export function newTurn(question, images, kind) {
  return {
    question,
    kind, // of the answer: text, image, edit or video
    images: images.map(({ name, size, kind }) => ({ name, size, kind })),
    state: "running", // or done, failed, cancelled
    name: `page-${crypto.getRandomValues(new BigUint64Array(1))[0].toString(16).padStart(16, "0")}`,
    id: null,
    last: null, // the id of the last event whose text is in `texts`
    texts: [],
    painted: [], // the URLs of the images of the answer
    status: "Sending",
    error: [],
    facts: { resumed: "never" },
    request: null,
    beganMs: Date.now(),
    resumes: 0,
  };
}

/** Shows a turn. `urls` are those of its images, or null where a reload has forgotten them. */
export class Turn {
  constructor(number, kept, urls) {
    this.number = number;
    this.kept = kept;
    this.urls = urls;
    this.writers = [];
    this.paintings = [];
    this.element = newElement("article", "turn");
    this.element.ariaLabel = `Question ${number + 1}`;
    this.element.append(this.askedPart(), this.answerPart(), this.timelinePart());
    kept.painted.forEach((url, index) => this.paint(url, index));
    kept.texts.forEach((text, index) => this.writerOf(index).write(text));
    this.busy = kept.state === "running";
    this.say(kept.status);
    Object.entries(kept.facts).forEach(([name, text]) => this.fact(name, text));
    if (kept.id !== null) this.accepted(kept.id);
    if (kept.request !== null) this.showStages(kept.request);
    if (kept.error.length) this.fail(kept.error);
    if (urls === null) this.remark("A reload has forgotten the images of this question. They are no longer sent.");
    if (!this.busy) this.end(kept.state, kept.status);
  }

  /** Return the messages that later requests are sent with. A turn without an answer has none. */
  get messages() {
    const text = this.kept.texts[0] ?? "";
    if (this.busy || text.trim() === "") return [];
    return [{ role: "user", content: this.content }, { role: "assistant", content: text }];
  }

  get content() {
    const images = (this.urls ?? []).map((url, at) => partOf(this.kept.images[at], url));
    return images.length ? [...images, { type: "text", text: this.kept.question }] : this.kept.question;
  }

  // -- changes that a request makes ------------------------------------------------------------

  accepted(id) {
    this.kept.id = id;
    this.request.textContent = id;
    this.copy.hidden = false;
  }

  write(index, text) {
    while (this.kept.texts.length <= index) this.kept.texts.push("");
    this.kept.texts[index] += text;
    this.writerOf(index).write(text);
  }

  /** Show an image, or a preview of it, in the place of the one before. */
  paint(url, index) {
    while (this.paintings.length <= index) {
      this.kept.painted[this.paintings.length] ??= "";
      this.paintings.push(Object.assign(add(this.text, "img", "painted"), { alt: `Painted: ${this.kept.question}` }));
    }
    this.kept.painted[index] = url;
    if (url) this.paintings[index].src = url;
  }

  /** Show how much of a video is made, in percent. */
  progress(percent) {
    this.bar ??= Object.assign(add(this.text, "progress"), { max: 100, ariaLabel: "Progress of the video" });
    this.bar.value = percent;
    this.say(`Making the video: ${percent} %`);
  }

  film(url) {
    const video = Object.assign(newElement("video", "painted"), { src: url, controls: true, loop: true });
    video.ariaLabel = `Video: ${this.kept.question}`;
    this.text.replaceChildren(video);
  }

  /** Whether a reload has forgotten the video. */
  get lacksVideo() {
    return this.kept.kind === "video" && this.kept.state === "done" && this.text.childElementCount === 0;
  }

  fact(name, text) {
    this.kept.facts[name] = text;
    this.facts[name].textContent = text;
  }

  say(text) {
    this.kept.status = text;
    this.status.textContent = text;
  }

  showStages(request) {
    const { state, stage, path, now_ms, waits_for } = request;
    this.kept.request = { state, stage, path, now_ms, waits_for };
    this.stages.show(this.kept.request);
    const last = path.at(-1);
    if (last) this.whole.textContent = duration((last.ended_ms ?? now_ms) - path[0].began_ms);
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
    this.writers.forEach((writer) => writer.finish());
    if (this.messages.length === 0 && this.kept.kind === "text") this.remark("This question has no answer, and later ones are sent without it.");
  }

  remark(text) {
    add(this.notes, "p", "hint").textContent = text;
  }

  set busy(isBusy) {
    this.text.ariaBusy = String(isBusy);
  }

  get busy() {
    return this.text.ariaBusy === "true";
  }

  // -- elements --------------------------------------------------------------------------------

  askedPart() {
    const asked = newElement("div", "asked");
    const list = newElement("ul", "thumbs");
    list.ariaLabel = "Images of the question";
    this.kept.images.forEach(({ name }, at) => {
      const item = add(list, "li");
      if (this.urls === null) item.textContent = name;
      else item.append(Object.assign(viewOf(this.urls[at], name), { title: name }));
    });
    if (this.kept.images.length) asked.append(list);
    add(asked, "p", "question").textContent = this.kept.question;
    return asked;
  }

  answerPart() {
    const answer = newElement("section", "answer");
    answer.ariaLabel = "Answer";
    this.status = add(answer, "p", "status");
    this.status.role = "status";
    this.text = add(answer, "div", "text");
    this.text.ariaLive = "polite";
    this.error = add(answer, "div", "error");
    this.error.role = "alert";
    this.error.hidden = true;
    this.notes = add(answer, "div", "notes");
    return answer;
  }

  timelinePart() {
    const timeline = newElement("details", "timeline");
    timeline.open = !NARROW.matches;
    const summary = add(timeline, "summary");
    summary.append("Timeline ");
    this.whole = add(summary, "span", "whole");
    const list = add(timeline, "ol", "stages");
    list.ariaLabel = "Stages of the request";
    this.stages = new Stages(list);
    const facts = add(timeline, "dl", "facts");
    this.facts = {};
    for (const [name, title] of FACTS) {
      const row = add(facts, "div");
      add(row, "dt").textContent = title;
      this.facts[name] = add(row, "dd", name);
      this.facts[name].textContent = "–";
    }
    const row = add(timeline, "p", "request-row");
    this.request = add(row, "code", "request");
    this.request.textContent = "–";
    this.copy = add(row, "button", "quiet small copy");
    Object.assign(this.copy, { type: "button", textContent: "Copy id", hidden: true });
    this.copy.addEventListener("click", () => this.copyId());
    return timeline;
  }

  async copyId() {
    try {
      await navigator.clipboard.writeText(this.kept.id);
      this.copy.textContent = "Copied";
    } catch {
      // Browsers give the clipboard only to pages with TLS or of this machine.
      getSelection().selectAllChildren(this.request);
      this.copy.textContent = "Selected";
    }
    setTimeout(() => (this.copy.textContent = "Copy id"), COPIED_MS);
  }

  /** Each choice of an answer is shown by itself. */
  writerOf(index) {
    while (this.writers.length <= index) this.writers.push(new TextWriter(add(this.text, "div", "choice")));
    return this.writers[index];
  }
}
