// Keeps a conversation across a reload of its tab, in sessionStorage: about five million characters.

const TURN = "pagemill.turn.";
const IMAGES = "pagemill.images.";

/** Return the turns that are stored, in order: `{turn, urls}`, with `urls` null where they did not fit. */
export function load() {
  const turns = [];
  for (let number = 0; ; number += 1) {
    const turn = read(TURN + number);
    if (turn === null) return turns;
    turns.push({ turn, urls: turn.images.length ? read(IMAGES + number) : [] });
  }
}

export function clear() {
  for (const name of Object.keys(sessionStorage)) {
    if (name.startsWith(TURN) || name.startsWith(IMAGES)) sessionStorage.removeItem(name);
  }
}

/** Store the images of a turn. Return whether they fit. */
export const saveImages = (number, urls) => write(IMAGES + number, urls);

/**
 * Store a turn without its images. Where it does not fit, images of earlier turns make room.
 *
 * Return the numbers of the turns whose images have been removed.
 */
export function saveTurn(number, turn) {
  const removed = [];
  for (let other = 0; !write(TURN + number, turn) && other <= number; other += 1) {
    if (sessionStorage.getItem(IMAGES + other) === null) continue;
    sessionStorage.removeItem(IMAGES + other);
    removed.push(other);
  }
  return removed;
}

function write(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // The quota is used up, or the browser stores nothing for this page.
  }
}

function read(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}
