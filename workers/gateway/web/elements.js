// Elements of the pages, faults next to fields, and requests to the server.

/** Address of the gateway, which may be below a path of another server. */
export const ROOT = new URL("..", import.meta.url).href;
const COPIED_MS = 2000;

export const $ = (id) => document.getElementById(id);

/** Return the headers with the API key that was entered. */
export const headers = () => ($("key").value ? { Authorization: `Bearer ${$("key").value.trim()}` } : {});

export function newElement(tag, name = "", properties = {}) {
  return Object.assign(document.createElement(tag), { className: name, ...properties });
}

export function add(parent, tag, name = "", properties = {}) {
  return parent.appendChild(newElement(tag, name, properties));
}

export function addButton(parent, text, act, name = "quiet small") {
  const button = add(parent, "button", name, { type: "button", textContent: text });
  button.addEventListener("click", act);
  return button;
}

/** Add a button that copies what `read` returns. Where the clipboard is refused, it selects `element`. */
export function addCopy(parent, text, read, element) {
  const button = addButton(parent, text, async () => {
    try {
      await navigator.clipboard.writeText(read());
      button.textContent = "Copied";
    } catch {
      // Browsers give the clipboard only to pages with TLS or of this machine.
      getSelection().selectAllChildren(element);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = text), COPIED_MS);
  });
  return button;
}

/** Show lines as the paragraphs of a box, or hide it if there are none. */
export function showLines(box, lines) {
  box.replaceChildren(...lines.map((line) => newElement("p", "", { textContent: line })));
  box.hidden = lines.length === 0;
}

/** Show a fault of a field: next to it in a panel, above the composer otherwise. Returns null. */
export function complain(text, input) {
  const panel = input.closest("[popover]");
  if (panel === null) showLines($("notice"), [text]);
  else showFault(panel, text, input);
  input.focus();
  return null;
}

function showFault(panel, text, input) {
  panel.togglePopover(true);
  clearFault(input);
  const fault = newElement("p", "fault", { id: `fault-${input.id}`, role: "alert", textContent: text });
  input.after(fault);
  input.ariaInvalid = "true";
  input.setAttribute("aria-errormessage", fault.id);
  input.addEventListener("input", () => clearFault(input), { once: true });
}

export function clearFault(input) {
  $(`fault-${input.id}`)?.remove();
  input.ariaInvalid = null;
  input.removeAttribute("aria-errormessage");
}

/** Return the JSON object that was entered into a field, or null after showing what is wrong. */
export function readObject(input) {
  let value;
  try {
    value = JSON.parse(input.value.trim() || "{}");
  } catch (error) {
    return complain(`The parameters are not JSON: ${error.message}`, input);
  }
  const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
  return isObject ? value : complain("The parameters must be one JSON object.", input);
}

/** Show whether the server is ready, for screen readers only when that changes. */
export function drawHealth(state, text) {
  $("health").dataset.state = state;
  if ($("health").textContent !== text) $("health").textContent = text;
}
