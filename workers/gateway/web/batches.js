// The page of batches: begins them, and shows the progress of all batches of a tenant.

import { Batch, call } from "./batch.js";
import { $, clearFault, complain, drawHealth, readObject, showLines } from "./elements.js";
import "./frame.js";
import { Images } from "./images.js";
import { partOf } from "./media.js";
import { LIMITS } from "./pipeline.js";
import { explain } from "./run.js";

const CHAT = "/v1/chat/completions";
const RUNNING_MS = 1000;
const IDLE_MS = 5000;
const MIB = 2 ** 20;
const MAX_NAME_LENGTH = 200;

/** Files of requests, and images for which requests are made. */
class Inputs extends Images {
  async readFile(file) {
    const head = await file.slice(0, 64).text().catch(() => "");
    if (!file.name.endsWith(".jsonl") && !head.trimStart().startsWith("{")) return super.readFile(file);
    if (file.size > LIMITS.maxBatchBytes) return { fault: `${file.name} exceeds the limit of ${LIMITS.maxBatchBytes / MIB} MiB.` };
    return { image: { name: file.name, size: file.size, kind: "lines", file } };
  }
}

const inputs = new Inputs($("drop"), $("file"), $("files"), (faults) => showLines($("notice"), faults));
const batches = new Map(); // by id, in the order of the page
let isSending = false;
let round = 0; // of polls

// -- the next batch ---------------------------------------------------------------------------

async function submit() {
  await inputs.added;
  if (isSending) return;
  const files = await compose();
  if (files === null) return;
  showLines($("notice"), []);
  isSending = true;
  drawButtons();
  try {
    for (const file of files) {
      $("send").textContent = `Uploading ${file.name}`;
      const batch = await begin(file);
      inputs.replace(inputs.chosen.filter((input) => !file.inputs.includes(input)));
      showNewest([batch]);
    }
    $("question").value = "";
  } catch (error) {
    showLines($("notice"), explain(error));
  }
  isSending = false;
  drawButtons();
}

/** Return the files of requests to run, or null after showing what is wrong. */
async function compose() {
  const lines = inputs.chosen.filter(({ kind }) => kind === "lines");
  const images = inputs.chosen.filter(({ kind }) => kind !== "lines");
  if (inputs.chosen.length === 0) return complain("Add a file of requests, or images and a prompt.", $("file"));
  const files = [];
  for (const input of lines) {
    const endpoint = await endpointOf(input.file);
    if (endpoint === null) return complain(`The first line of ${input.name} is not a request with a url.`, $("file"));
    files.push({ name: input.name, content: input.file, endpoint, inputs: [input] });
  }
  if (images.length === 0) return files;
  const content = contentOf(images);
  return content && [...files, { name: "images.jsonl", content, endpoint: CHAT, inputs: images }];
}

/** Return the endpoint that the first line of a file names, or null. */
async function endpointOf(file) {
  const head = await file.slice(0, LIMITS.maxLineBytes).text();
  try {
    return JSON.parse(head.split("\n", 1)[0]).url ?? null;
  } catch {
    return null;
  }
}

/** Return a file with a request for each image, or null after showing what is wrong. */
function contentOf(images) {
  const prompt = $("question").value.trim();
  if (prompt === "") return complain("Write a prompt for the images.", $("question"));
  clearFault($("more"));
  const more = readObject($("more"));
  if (more === null) return null;
  const lines = images.map((image, number) => {
    const content = [partOf(image, image.url), { type: "text", text: prompt }];
    const body = { model: $("model").value, messages: [{ role: "user", content }], ...more };
    const name = `${number + 1}-${image.name.slice(-MAX_NAME_LENGTH)}`;
    return `${JSON.stringify({ custom_id: name, method: "POST", url: CHAT, body })}\n`;
  });
  const long = lines.findIndex((line) => line.length > LIMITS.maxLineBytes);
  if (long >= 0) return complain(`${images[long].name} exceeds the limit of a request, ${LIMITS.maxLineBytes / MIB} MiB.`, $("file"));
  const content = new Blob(lines);
  if (content.size <= LIMITS.maxBatchBytes) return content;
  return complain(`The images exceed the limit of a batch, ${LIMITS.maxBatchBytes / MIB} MiB.`, $("file"));
}

async function begin({ name, content, endpoint }) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", content, name);
  const file = await call("files", { method: "POST", body: form });
  const order = { input_file_id: file.id, endpoint, completion_window: $("window").value.trim() };
  const headers = { "Content-Type": "application/json" };
  return call("batches", { method: "POST", headers, body: JSON.stringify(order) });
}

function drawButtons() {
  $("send").disabled = isSending || $("model").disabled;
  if (!isSending) $("send").textContent = "Run";
}

// -- the batches ------------------------------------------------------------------------------

/** Show the newest batches, given the newest first. */
function showNewest(page) {
  for (const batch of [...page].reverse()) {
    if (!batches.has(batch.id)) $("batches").prepend(batchOf(batch.id).element);
    batchOf(batch.id).show(batch);
  }
}

function batchOf(id) {
  if (!batches.has(id)) batches.set(id, new Batch(id));
  return batches.get(id);
}

async function refresh() {
  const page = await call("batches");
  showNewest(page.data);
  if (batches.size === page.data.length) $("older").hidden = !page.has_more;
  const newest = new Set(page.data.map(({ id }) => id));
  for (const batch of batches.values()) {
    if (!batch.isOver && !newest.has(batch.id)) batch.show(await call(`batches/${batch.id}`));
  }
}

async function showOlder() {
  const last = $("batches").lastElementChild.querySelector("code").textContent;
  const page = await call(`batches?after=${last}`);
  for (const batch of page.data) {
    if (!batches.has(batch.id)) $("batches").append(batchOf(batch.id).element);
    batchOf(batch.id).show(batch);
  }
  $("older").hidden = !page.has_more;
}

// -- the server -------------------------------------------------------------------------------

/** Show the batches again and again, until another call takes over. */
async function poll(mine = ++round) {
  if (mine !== round) return;
  try {
    await refresh();
    drawHealth("ready", "Ready");
    if ($("model").disabled) await loadModels();
  } catch (error) {
    if (error.status === 401) return askForKey();
    drawHealth("away", error instanceof TypeError ? "Not reachable" : error.message);
  }
  const isRunning = [...batches.values()].some((batch) => !batch.isOver);
  setTimeout(poll, isRunning ? RUNNING_MS : IDLE_MS, mine);
}

/** Show the batches of the tenant that the entered key belongs to. */
function changeKey() {
  batches.clear();
  $("batches").replaceChildren();
  poll();
}

/** Polling continues when a key is entered. */
function askForKey() {
  drawHealth("away", "API key required");
  $("settings").togglePopover(true);
}

async function loadModels() {
  const { data } = await call("models");
  $("settings").togglePopover(false); // It was opened for the key.
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  $("model").disabled = data.length === 0;
  drawButtons();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("older").addEventListener("click", () => {
  showOlder().catch((error) => showLines($("notice"), explain(error)));
});
$("key").addEventListener("change", changeKey);
poll();
