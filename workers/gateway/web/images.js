import { LIMITS } from "./pipeline.js";

// The images of the next question: chosen, dropped or pasted.

const KINDS = "PNG, JPEG or WebP";
const MIB = 2 ** 20;

/** The list of images: `chosen` has the name, the size and the data: URL of each, in order. */
export class Images {
  /** `refuse` is called with a sentence about each file that is not an image or is too large. */
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
    const read = await Promise.all(files.map(readImage));
    this.refuse(read.map(({ fault }) => fault).filter(Boolean));
    this.replace([...this.chosen, ...read.map(({ image }) => image).filter(Boolean)]);
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
    const item = document.createElement("li");
    const preview = item.appendChild(document.createElement("img"));
    preview.src = image.url;
    preview.alt = "";
    const name = item.appendChild(document.createElement("span"));
    name.textContent = image.name;
    const size = name.appendChild(document.createElement("small"));
    size.textContent = `${Math.max(1, Math.round(image.size / 1024)).toLocaleString("en")} KiB`;
    const remove = item.appendChild(document.createElement("button"));
    remove.type = "button";
    remove.className = "remove";
    remove.textContent = "×";
    remove.ariaLabel = `Remove ${image.name}`;
    remove.addEventListener("click", () => this.remove(image));
    return item;
  }
}

/** Return an image, or the fault of a file that is none. */
async function readImage(file) {
  const fault = await findFault(file);
  if (fault !== null) return { fault };
  return describe(file).then((image) => ({ image }), () => ({ fault: `${file.name} cannot be read.` }));
}

/** Return a sentence about a file that the server would refuse, or null. The bytes decide, not the name. */
async function findFault(file) {
  if (file.size > LIMITS.maxImageBytes) {
    return `${file.name} has ${mebibytes(file.size)}, over the limit of ${mebibytes(LIMITS.maxImageBytes)}.`;
  }
  const head = new Uint8Array(await file.slice(0, 12).arrayBuffer().catch(() => new ArrayBuffer(0)));
  if (!isImage(head)) return `${file.name} is not a ${KINDS} image.`;
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

/** Return whether a file's first bytes are those of the kinds that the renderer decodes. */
function isImage(head) {
  const text = String.fromCharCode(...head);
  return (
    text.startsWith("\x89PNG\r\n\x1a\n") ||
    text.startsWith("\xff\xd8\xff") ||
    (text.startsWith("RIFF") && text.slice(8) === "WEBP")
  );
}

/** Return a size with enough digits to differ from the limit that is shown beside it. */
function mebibytes(bytes) {
  if (bytes < MIB / 10) return `${bytes.toLocaleString("en")} bytes`;
  return `${(bytes / MIB).toLocaleString("en", { maximumFractionDigits: 2 })} MiB`;
}

function describe(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, size: file.size, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
