import { add, addButton, newElement } from "./elements.js";
import { HEAD_BYTES, typeOf, viewOf } from "./media.js";
import { LIMITS } from "./pipeline.js";

// The images and clips of the next question: chosen, dropped or pasted.

const KINDS =
  "a PNG, JPEG or WebP image, a GIF, MP4 or WebM clip, a WAV, FLAC, OGG or MP3 sound, or a PDF document";
const MIB = 2 ** 20;

/** The list of files: `chosen` has the name, the size, the kind and the data: URL of each, in order. */
export class Images {
  /** `refuse` is called with a sentence about each file that is no image or clip, or is too large. */
  constructor(area, input, list, refuse) {
    this.area = area;
    this.input = input;
    this.list = list;
    this.refuse = refuse;
    this.chosen = [];
    /** Settles when the files that were added so far have been read. */
    this.added = Promise.resolve();
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
    });
    addEventListener("paste", (event) => this.add([...event.clipboardData.files]));
    this.watchDrags();
  }

  /** Accept files that are dropped anywhere: otherwise an image beside the area would replace the page. */
  watchDrags() {
    const highlight = (isOver) => this.area.toggleAttribute("data-over", isOver);
    addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      highlight(true);
    });
    // Between two elements of the page the drag has a related target.
    addEventListener("dragleave", (event) => event.relatedTarget === null && highlight(false));
    addEventListener("dragend", () => highlight(false));
    addEventListener("drop", (event) => {
      highlight(false);
      const files = [...(event.dataTransfer?.files ?? [])];
      if (files.length === 0) return;
      event.preventDefault();
      this.add(files);
    });
  }

  /** Add files after those that are still being read, so that the images have the order of choice. */
  add(files) {
    if (files.length > 0) this.added = this.added.then(() => this.read(files));
  }

  async read(files) {
    const read = await Promise.all(files.map((file) => this.readFile(file)));
    this.refuse(read.map(({ fault }) => fault).filter(Boolean));
    this.replace([...this.chosen, ...read.map(({ image }) => image).filter(Boolean)]);
  }

  /** Return an image, or the fault of a file that is none. */
  readFile(file) {
    return readImage(file);
  }

  replace(images) {
    this.chosen = images;
    this.draw();
  }

  remove(image) {
    this.replace(this.chosen.filter((other) => other !== image));
    this.input.focus();
  }

  draw() {
    this.list.replaceChildren(...this.chosen.map((image) => this.item(image)));
  }

  item(image) {
    const item = newElement("li");
    if (image.url) item.append(viewOf(image.url, ""));
    const name = add(item, "span", "", { textContent: image.name });
    add(name, "small", "", { textContent: `${Math.max(1, Math.round(image.size / 1024)).toLocaleString("en")} KiB` });
    addButton(item, "×", () => this.remove(image), "remove").ariaLabel = `Remove ${image.name}`;
    return item;
  }
}

async function readImage(file) {
  const head = new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer().catch(() => new ArrayBuffer(0)));
  const found = typeOf(head);
  const fault = await findFault(file, found);
  if (fault !== null) return { fault };
  return describe(file, found).then((image) => ({ image }), () => ({ fault: `${file.name} cannot be read.` }));
}

/** Return a sentence about a file that the server would refuse, or null. The bytes decide, not the name. */
async function findFault(file, found) {
  const limits = { audio: LIMITS.maxAudioBytes, video: LIMITS.maxVideoBytes, document: LIMITS.maxDocumentBytes };
  const limit = limits[found?.kind] ?? LIMITS.maxImageBytes;
  if (file.size > limit) return `${file.name} has ${mebibytes(file.size)}, over the limit of ${mebibytes(limit)}.`;
  if (found === null) return `${file.name} is not ${KINDS}.`;
  if (!found.type.startsWith("image/")) return null;
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return `${file.name} is damaged: it cannot be read as an image.`;
  }
  const { width, height } = bitmap;
  bitmap.close();
  if (width * height <= LIMITS.maxImagePixels && Math.max(width, height) <= LIMITS.maxImageSide) return null;
  return (
    `${file.name} has ${width} x ${height} pixels, over the limit of ${LIMITS.maxImagePixels.toLocaleString("en")}` +
    ` pixels or ${LIMITS.maxImageSide.toLocaleString("en")} on a side.`
  );
}

/** Return a size with enough digits to differ from the limit that is shown beside it. */
function mebibytes(bytes) {
  if (bytes < MIB / 10) return `${bytes.toLocaleString("en")} bytes`;
  return `${(bytes / MIB).toLocaleString("en", { maximumFractionDigits: 2 })} MiB`;
}

function describe(file, { type, kind }) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, size: file.size, kind, url: reader.result });
    reader.onerror = () => reject(reader.error);
    // The type that the browser has derived of the name may be another.
    reader.readAsDataURL(new Blob([file], { type }));
  });
}
