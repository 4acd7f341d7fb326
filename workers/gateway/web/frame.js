// The frame of all pages: conversations, links to the other pages, and enlarged images.

import { ROOT, add, addButton, newElement } from "./elements.js";
import * as store from "./store.js";

const LINKS = [["Batches", "page/batches.html"], ["Responses", "page/response.html"], ["OpenAPI", "openapi.json"]];

const side = document.getElementById("side");
let conversations = null;

/** Fill the navigation. */
function drawSide() {
  const brand = add(side, "p", "brand");
  add(brand, "img", "", { src: `${ROOT}page/mark.svg`, alt: "", width: 22, height: 22 });
  brand.append("Pagemill");
  add(side, "a", "button", { id: "new", href: `${ROOT}#`, textContent: "New conversation" });
  conversations = add(side, "ul", "conversations", { ariaLabel: "Conversations" });
  const links = add(side, "ul", "links", { ariaLabel: "Pages" });
  for (const [title, path] of LINKS) {
    const link = add(add(links, "li"), "a", "", { href: ROOT + path, textContent: title });
    if (link.href === location.href.split("#")[0]) link.ariaCurrent = "page";
  }
  side.addEventListener("click", (event) => event.target.closest("a") && side.togglePopover(false));
  drawConversations();
}

/** Show the stored conversations, the newest first. */
export function drawConversations() {
  conversations.replaceChildren(...store.list().map(entryOf));
}

/** Return the id of the conversation that is open, or an empty text. */
export const openId = () => (location.href.startsWith(`${ROOT}#`) && location.hash.match(/^#([0-9a-f]{8})$/)?.[1]) || "";

function entryOf({ id, title }) {
  const entry = newElement("li");
  const link = add(entry, "a", "", { href: `${ROOT}#${id}`, textContent: title, title });
  if (id === openId()) link.ariaCurrent = "page";
  const rename = addButton(entry, "Rename", () => askForTitle(id, link));
  rename.ariaLabel = `Rename ${title}`;
  const remove = addButton(entry, "Delete", () => {
    if (remove.textContent === "Delete") return (remove.textContent = "Really?");
    store.remove(id);
    if (id === openId()) location.hash = "";
    drawConversations();
    side.querySelector("#new").focus();
  });
  remove.ariaLabel = `Delete ${title}`;
  remove.addEventListener("blur", () => (remove.textContent = "Delete"));
  return entry;
}

/** Put a field in the place of a title. Enter or leaving the field keeps the new title, Escape the old. */
function askForTitle(id, link) {
  const field = newElement("input", "", { value: link.textContent, ariaLabel: "Title", maxLength: 200 });
  link.replaceWith(field);
  field.select();
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") field.value = "";
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    field.blur();
  });
  field.addEventListener("blur", () => {
    const title = field.value.trim();
    const conversation = store.get(id);
    if (title !== "" && conversation !== null) store.save({ ...conversation, title });
    drawConversations();
  });
}

/** Return an image as a button that enlarges it. */
export function enlargeable(image) {
  const button = newElement("button", "enlarge", { type: "button", ariaLabel: `Enlarge ${image.alt}` });
  button.addEventListener("click", () => enlarge(image));
  button.append(image);
  return button;
}

function enlarge({ src, alt }) {
  const dialog = add(document.body, "dialog", "lightbox", { ariaLabel: alt });
  add(dialog, "img", "", { src, alt });
  const acts = add(dialog, "p", "acts");
  add(acts, "span", "", { textContent: alt });
  add(acts, "a", "", { href: src, download: "image", textContent: "Save" });
  addButton(acts, "Close", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

/** Whether Escape closes something other than the page's own work. */
export const isCovered = () => document.querySelector("dialog[open], :popover-open") !== null;

drawSide();
addEventListener("hashchange", drawConversations);
addEventListener("storage", drawConversations); // Another tab has changed them.
