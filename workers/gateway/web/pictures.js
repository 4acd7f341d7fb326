// The pictures of a question: chosen, dropped or pasted.

/** `urls` has them as data: URLs, in order. */
export class Pictures {
  constructor(area, input, list) {
    this.area = area;
    this.list = list;
    this.chosen = [];
    input.addEventListener("change", () => {
      this.add(input.files);
      input.value = "";
    });
    addEventListener("paste", (event) => this.add(event.clipboardData.files));
    // A picture that misses the area would otherwise replace the page.
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
    return this.chosen.map((picture) => picture.url);
  }

  async add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    const read = await Promise.all(images.map(async (file) => ({ file, url: await dataUrl(file) })));
    this.chosen.push(...read);
    this.draw();
  }

  remove(picture) {
    this.chosen = this.chosen.filter((other) => other !== picture);
    this.draw();
    document.getElementById("file").focus();
  }

  draw() {
    this.area.toggleAttribute("data-filled", this.chosen.length > 0);
    this.list.replaceChildren(...this.chosen.map((picture) => this.item(picture)));
  }

  item(picture) {
    const { file, url } = picture;
    const item = document.createElement("li");
    const image = item.appendChild(document.createElement("img"));
    image.src = url;
    image.alt = "";
    const name = item.appendChild(document.createElement("span"));
    name.textContent = file.name;
    const size = name.appendChild(document.createElement("small"));
    size.textContent = `${Math.max(1, Math.round(file.size / 1024)).toLocaleString("en")} KiB`;
    const remove = item.appendChild(document.createElement("button"));
    remove.type = "button";
    remove.className = "remove";
    remove.textContent = "×";
    remove.ariaLabel = `Remove ${file.name}`;
    remove.addEventListener("click", () => this.remove(picture));
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
