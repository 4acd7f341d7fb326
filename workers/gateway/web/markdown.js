// Shows Markdown as it arrives, as elements and text nodes: markup that a model writes stays text.

import { add, addCopy, newElement } from "./elements.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// Code, links, escapes and emphasis. The parts of a match are in this order.
const INLINE =
  /(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)|!?\[([^\]\n]*)\]\(<?([^)\s>]+)>?(?:\s+"[^"]*")?\)|<?(https?:\/\/[^\s<>"'`]+[^\s<>"'`.,:;!?)\]}])>?|\\([!-/:-@[-`{-~])|(\*\*|__|~~)(?=\S)(.+?)(?<=\S)\7|(?<!\w)([*_])(?=[^\s*_])(.+?)(?<=[^\s*_])\9(?!\w)/s;
const MAX_DEPTH = 8;

/** Appends to `box`. Blocks that are complete are not drawn again. */
export class Markdown {
  constructor(box) {
    this.box = box;
    this.tail = ""; // the text of the last block, which may still change
    this.drawn = []; // the element of the last block
    this.open = null; // that block, if it is code
  }

  write(text) {
    this.tail += text;
    const blocks = split(this.tail.split("\n"));
    const last = blocks.at(-1);
    if (blocks.length === 1 && last.code && this.open?.language === last.language) {
      // The element stays, and with it the place to which a reader has scrolled.
      this.drawn[0].querySelector("pre code").textContent = last.lines.join("\n");
      return;
    }
    this.drawn.forEach((element) => element.remove());
    const elements = blocks.map((block) => draw(block, 0));
    this.box.append(...elements);
    this.drawn = elements.slice(-1);
    this.open = last?.code ? last : null;
    if (last) this.tail = this.tail.split("\n").slice(last.from).join("\n");
  }
}

/** Return the blocks of lines: each with its kind, its lines, and the number of its first line. */
function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const from = at;
    const fence = lines[at].match(FENCE);
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    if (fence) {
      const isEnd = (line) => line.trim().startsWith(fence[1]) && line.trim().replaceAll(fence[1][0], "") === "";
      const end = lines.findIndex((line, i) => i > from && isEnd(line));
      at = end < 0 ? lines.length : end + 1;
      blocks.push({ from, code: true, language: fence[2], lines: lines.slice(from + 1, end < 0 ? at : end) });
    } else if (HEADING.test(lines[at]) || RULE.test(lines[at])) {
      at += 1;
      blocks.push({ from, lines: lines.slice(from, at) });
    } else {
      const isItem = ITEM.test(lines[at]);
      do at += 1;
      while (at < lines.length && (isItem ? goesOn(lines, at) : !startsBlock(lines[at])));
      blocks.push({ from, lines: lines.slice(from, at) });
    }
  }
  return blocks;
}

const startsBlock = (line) => [FENCE, HEADING, RULE, ITEM].some((start) => start.test(line)) || line.trim() === "";

/** Whether a line is a part of the list before it: another item, or an indented line. */
function goesOn(lines, at) {
  const next = lines.slice(at).find((line) => line.trim() !== "");
  if (next === undefined) return true;
  if (lines[at].trim() === "") return ITEM.test(next) || next.startsWith("  ");
  return ITEM.test(lines[at]) || lines[at].startsWith("  ") || !startsBlock(lines[at]);
}

function draw({ code, language, lines }, depth) {
  if (code) return drawCode(language, lines.join("\n"));
  const [first, second] = lines;
  const heading = first.match(HEADING);
  if (heading) return inline(newElement("h2", `level-${heading[1].length}`), heading[2]);
  if (RULE.test(first)) return newElement("hr");
  if (depth < MAX_DEPTH && QUOTE.test(first)) return nest(newElement("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth);
  if (depth < MAX_DEPTH && ITEM.test(first)) return drawList(lines, depth);
  if (first.includes("|") && second !== undefined && TABLE.test(second)) return drawTable(lines);
  return inline(newElement("p"), lines.join("\n"));
}

function nest(parent, lines, depth) {
  parent.append(...split(lines).map((block) => draw(block, depth + 1)));
  return parent;
}

/** Code with the name of its language and a button that copies it. */
function drawCode(language, text) {
  const box = newElement("div", "code");
  const head = add(box, "div", "code-head");
  add(head, "span", "", { textContent: language });
  const code = newElement("code", "", { textContent: text });
  addCopy(head, "Copy", () => code.textContent, code).ariaLabel = "Copy the code";
  // It scrolls sideways, also by keyboard.
  const pre = add(box, "pre", "", { tabIndex: 0, role: "group", ariaLabel: "Code" });
  pre.append(code);
  return box;
}

function drawList(lines, depth) {
  const [, indent, mark] = lines[0].match(ITEM);
  const list = newElement(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) list.start = parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent.length + 1) items.push([line.slice(item[0].length)]);
    else items.at(-1).push(line.replace(new RegExp(`^ {0,${indent.length + mark.length + 1}}`), ""));
  }
  for (const item of items) {
    const [first, ...rest] = split(item);
    const row = add(list, "li");
    // The text of an item is no paragraph, so that the items are close together.
    if (first && !startsBlock(first.lines[0])) inline(row, first.lines.join("\n"));
    else if (first) row.append(draw(first, depth + 1));
    row.append(...rest.map((block) => draw(block, depth + 1)));
  }
  return list;
}

function drawTable([head, , ...rows]) {
  const box = newElement("div", "table", { tabIndex: 0, role: "group", ariaLabel: "Table" });
  const table = add(box, "table");
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const columns = cells(head);
  const fill = (row, tag, texts) => columns.forEach((_, i) => inline(add(row, tag), texts[i] ?? ""));
  fill(add(add(table, "thead"), "tr"), "th", columns);
  const body = add(table, "tbody");
  for (const row of rows) fill(add(body, "tr"), "td", cells(row));
  return box;
}

/** Append text with its code, links and emphasis to an element; return the element. */
function inline(parent, text, depth = 0) {
  for (let rest = text; rest !== ""; ) {
    const match = depth < MAX_DEPTH ? rest.match(INLINE) : null;
    if (match === null) {
      parent.append(rest);
      break;
    }
    const [whole, , code, label, target, url, escaped, strong, strongText, , softText] = match;
    if (match.index) parent.append(rest.slice(0, match.index));
    if (code !== undefined) add(parent, "code", "", { textContent: code.replace(/^ (.+) $/s, "$1") });
    else if (target !== undefined) link(parent, target, label || target, depth);
    else if (url !== undefined) link(parent, url, url, MAX_DEPTH);
    else if (escaped !== undefined) parent.append(escaped);
    else if (strong !== undefined) inline(add(parent, strong === "~~" ? "del" : "strong"), strongText, depth + 1);
    else inline(add(parent, "em"), softText, depth + 1);
    rest = rest.slice(match.index + whole.length);
  }
  return parent;
}

/** Add a link to a page or a mail address. Any other target stays text. */
function link(parent, target, label, depth) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return parent.append(`${label} (${target})`);
  const anchor = add(parent, "a", "", { href: target, target: "_blank", rel: "noopener noreferrer" });
  return inline(anchor, label, depth + 1);
}
