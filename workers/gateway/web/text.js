// Shows the text of an answer as it arrives: paragraphs and fenced code, made of text nodes alone.

const FENCE = "```";
const OPENING = /^```[^`]*$/;
const CLOSING = /^```\s*$/;

/** Appends to `box`. Markup in the text, as a model may write it, stays text. */
export class TextWriter {
  constructor(box) {
    this.box = box;
    this.block = null; // the paragraph or the code that text is appended to
    this.inCode = false;
    this.breaks = 0; // line breaks that come before the next text
    this.held = ""; // the beginning of a line that may become a fence
    this.isLineOpen = false; // whether the line can no longer become one
  }

  write(text) {
    const [first, ...rest] = text.split("\n");
    this.add(first);
    for (const line of rest) {
      this.endLine();
      this.add(line);
    }
  }

  /** Show what is held back, at the end of the answer. */
  finish() {
    if (this.held !== "" && !this.isFence) this.emit(this.held);
    this.held = "";
  }

  get isFence() {
    return (this.inCode ? CLOSING : OPENING).test(this.held);
  }

  add(text) {
    if (this.isLineOpen) return this.emit(text);
    this.held += text;
    if (FENCE.startsWith(this.held) || this.isFence) return;
    this.isLineOpen = true;
    this.emit(this.held);
    this.held = "";
  }

  endLine() {
    if (!this.isLineOpen && this.isFence) {
      this.inCode = !this.inCode;
      this.block = this.inCode ? this.box.appendChild(newElement("pre")).appendChild(newElement("code")) : null;
      this.breaks = 0;
    } else if (this.held !== "" || this.isLineOpen || this.inCode) {
      if (this.held !== "") this.emit(this.held);
      this.breaks += 1;
    } else {
      this.block = null; // An empty line ends a paragraph.
      this.breaks = 0;
    }
    this.held = "";
    this.isLineOpen = false;
  }

  emit(text) {
    if (text === "") return;
    this.block ??= this.box.appendChild(newElement("p"));
    // The line break after an opening fence belongs to the fence.
    this.block.append("\n".repeat(this.breaks) + text);
    this.breaks = 0;
  }
}

function newElement(tag) {
  const element = document.createElement(tag);
  if (tag === "pre") element.tabIndex = 0; // It scrolls sideways, also by keyboard.
  return element;
}
