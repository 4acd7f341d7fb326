// Elements of the pages, and the headers of their requests.

export const $ = (id) => document.getElementById(id);

/** Return the headers with the API key that was entered. */
export const headers = () => ($("key").value ? { Authorization: `Bearer ${$("key").value.trim()}` } : {});

export function newElement(tag, name = "") {
  const element = document.createElement(tag);
  element.className = name;
  return element;
}

export function add(parent, tag, name = "") {
  return parent.appendChild(newElement(tag, name));
}

/** Show lines as the paragraphs of a box, or hide it if there are none. */
export function showLines(box, lines) {
  box.replaceChildren(
    ...lines.map((line) => {
      const p = document.createElement("p");
      p.textContent = line;
      return p;
    }),
  );
  box.hidden = lines.length === 0;
}
