// The images of a question: chosen, dropped or pasted.

/** The list of images. `urls` returns them as data: URLs, in order. */
export class Images {
  constructor(area, input, list) {
    this.area = area;
    this.list = list;
    this.chosen = [];
    input.addEventListener("change", () => {
      this.add(input.files);
      input.value = "";
    });
    addEventListener("paste", (event) => this.add(event.clipboardData.files));
    // Otherwise an image that is dropped beside the area would replace the page.
    addEventListener("dragover", (event) => {
      event.preventDefault();
      area.toggleAttribute("data-over", area.contains(event.target));
    });
    addEventListener("dragleave", () => area.removeAttribute("data-over"));
    addEventListener("drop", (event) => {
      event.preventDefault();
      area.removeAttribute("data-over");
      this.add(event.dataTransfer.files);
    });
  }

  get urls() {
    return this.chosen.map((image) => image.url);
  }

  async add(files) {
    const imageFiles = [...files].filter((file) => file.type.startsWith("image/"));
    const read = await Promise.all(imageFiles.map(async (file) => ({ file, url: await dataUrl(file) })));
    this.chosen.push(...read);
    this.draw();
  }

  remove(image) {
    this.chosen = this.chosen.filter((other) => other !== image);
    this.draw();
    document.getElementById("file").focus();
  }

  draw() {
    this.area.toggleAttribute("data-filled", this.chosen.length > 0);
    this.list.replaceChildren(...this.chosen.map((image) => this.item(image)));
  }

  item(image) {
    const { file, url } = image;
    const item = document.createElement("li");
    const preview = item.appendChild(document.createElement("img"));
    preview.src = url;
    preview.alt = "";
    const name = item.appendChild(document.createElement("span"));
    name.textContent = file.name;
    const size = name.appendChild(document.createElement("small"));
    size.textContent = `${Math.max(1, Math.round(file.size / 1024)).toLocaleString("en")} KiB`;
    const remove = item.appendChild(document.createElement("button"));
    remove.type = "button";
    remove.className = "remove";
    remove.textContent = "×";
    remove.ariaLabel = `Remove ${file.name}`;
    remove.addEventListener("click", () => this.remove(image));
    return item;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
