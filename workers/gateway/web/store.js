// Keeps the conversations in localStorage: about five million characters for all of them.

const PREFIX = "pagemill/";
const FILES = "/files";

/** Return the conversations, the newest first: `{id, title, model, system, changedMs}`. */
export function list() {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX) && !name.slice(PREFIX.length).includes("/"))
    .map((name) => get(name.slice(PREFIX.length)))
    .filter((conversation) => conversation !== null)
    .sort((a, b) => b.changedMs - a.changedMs);
}

/** Return a conversation, or null if there is none. */
export const get = (id) => read(PREFIX + id);

/** Store a conversation without its turns. Return whether it fits, and what had to be removed for it. */
export const save = ({ id, ...rest }) => write(PREFIX + id, { id, ...rest });

export function remove(id) {
  removeTurns(id, 0);
  localStorage.removeItem(PREFIX + id);
}

/** Return the turns of a conversation, in order, with their files: null where these are not stored. */
export function load(id) {
  const turns = [];
  for (let turn; (turn = read(turnName(id, turns.length))) !== null; ) {
    turns.push({ turn, files: read(turnName(id, turns.length) + FILES) });
  }
  return turns;
}

/** Remove the turns from this number on. */
export function removeTurns(id, number) {
  for (let at = number; localStorage.getItem(turnName(id, at)) !== null; at += 1) {
    localStorage.removeItem(turnName(id, at));
    localStorage.removeItem(turnName(id, at) + FILES);
  }
}

export const saveTurn = (id, number, turn) => write(turnName(id, number), turn);

/** Store the files of a turn: the images of its question and of its answer, as data: URLs. */
export const saveFiles = (id, number, files) => write(turnName(id, number) + FILES, files);

const turnName = (id, number) => `${PREFIX}${id}/${number}`;

/** Store a value. Where it does not fit, the files of the oldest conversations make room. */
function write(name, value) {
  const text = JSON.stringify(value);
  const removed = []; // turns that have lost their files: `{id, number}`
  for (;;) {
    try {
      localStorage.setItem(name, text);
      return { fits: true, removed };
    } catch {
      // The quota is used up, or the browser stores nothing for this page.
      const oldest = findOldestFiles(name);
      if (oldest === undefined) return { fits: false, removed };
      localStorage.removeItem(oldest);
      const [id, number] = oldest.slice(PREFIX.length).split("/");
      removed.push({ id, number: Number(number) });
    }
  }
}

function findOldestFiles(except) {
  const ages = Object.fromEntries(list().map(({ id, changedMs }) => [id, changedMs]));
  const age = (name) => ages[name.split("/")[1]] ?? 0;
  const number = (name) => Number(name.split("/")[2]);
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX) && name.endsWith(FILES) && name !== except)
    .sort((a, b) => age(a) - age(b) || number(a) - number(b))[0];
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}
