// The page: conversations that use the public API alone.

import { $, ROOT, clearFault, complain, drawHealth, headers, readObject, showLines } from "./elements.js";
import { showExamples } from "./examples.js";
import { Filming } from "./filming.js";
import { drawConversations, isCovered, openId } from "./frame.js";
import { Images } from "./images.js";
import { partOf } from "./media.js";
import { Editing, Painting, bodyOf } from "./painting.js";
import { Parameters } from "./parameters.js";
import { LIMITS, MODELS } from "./pipeline.js";
import { Recorder } from "./recorder.js";
import { Run, explain } from "./run.js";
import { Follower } from "./scrolling.js";
import { Player } from "./speech.js";
import { hasEnded } from "./stages.js";
import * as store from "./store.js";
import { refusal } from "./stream.js";
import { Turn, newTurn } from "./turn.js";

const HEALTH_MS = 5000;
const SAVE_MS = 250;
const MIB = 2 ** 20;
const KEY_REQUIRED = "API key required";
const TITLE_LEN = 60;
// The focus would open the keyboard of a phone.
const HAS_MOUSE = matchMedia("(pointer: fine)").matches;
const RUNS = { text: Run, image: Painting, edit: Editing, video: Filming };
// Fields of requests that have an input of the page.
const INPUTS = { model: "model", max_tokens: "max-tokens", temperature: "temperature" };
const ACCEPT = {
  image: "image/png,image/jpeg,image/webp",
  video: "image/gif,video/mp4,video/webm",
  audio: "audio/wav,audio/flac,audio/ogg,audio/mpeg",
  document: "application/pdf",
};
const ACTS = { edit, retry };

const images = new Images($("drop"), $("file"), $("images"), (faults) => showLines($("notice"), faults));
const recorder = new Recorder($("record"), (files) => images.add(files), (faults) => showLines($("notice"), faults));
const parameters = new Parameters($("painting"));
const follower = new Follower($("log"), $("turns"), $("to-end"));
let conversation = newConversation();
let turns = [];
let edited = null; // the turn that the next question replaces
let voices = {}; // the first voice of each model that speaks
let running = null;
let savePending = () => {};

// -- the conversation -------------------------------------------------------------------------

function newConversation() {
  const id = crypto.getRandomValues(new Uint32Array(1))[0].toString(16).padStart(8, "0");
  return { id, title: "", model: "", system: "", changedMs: 0 };
}

async function submit() {
  await images.added;
  const chosen = images.chosen;
  if (isBusy() || !ask($("question").value.trim(), chosen, edited?.number ?? turns.length)) return;
  images.replace([]);
  $("question").value = "";
  edit(null);
}

/** Send a question as the turn of this number, which replaces this turn and those after it. */
function ask(question, chosen, number) {
  const asked = compose(question, chosen, number);
  if (asked === null) return false;
  turns.splice(number).forEach((turn) => turn.element.remove());
  store.removeTurns(conversation.id, number);
  saveConversation(question);
  showLines($("notice"), []);
  const turn = show(newTurn(question, chosen, asked.kind ?? "text"), { urls: chosen.map(({ url }) => url), painted: [] });
  if (chosen.length && !keep(store.saveFiles(conversation.id, number, filesOf(turn)))) {
    turn.remark("The images are too large to be kept across a reload.");
  }
  follower.toEnd();
  follow(turn, asked.body, asked.player).then(showRefusal);
  return true;
}

function edit(turn) {
  edited = turn;
  $("editing").hidden = turn === null;
  if (turn === null) return;
  $("editing").firstElementChild.textContent = `Sending replaces question ${turn.number + 1} and all turns after it.`;
  $("question").value = turn.kept.question;
  images.replace(turn.files);
  $("question").focus();
}

function retry(turn) {
  if (isBusy()) return;
  if (turn.urls === null) return complain("The images of this question are no longer stored: edit it and add them again.", $("question"));
  edit(null);
  ask(turn.kept.question, turn.files, turn.number);
}

/** Show an error of the server next to the field that it names. */
function showRefusal({ error }) {
  if (!error?.field) return;
  const name = error.field.split(/[.[]/)[0];
  const typed = $("more").value.includes(`"${name}"`) ? $("more") : $(INPUTS[name] ?? "");
  const input = parameters.find(error.field) ?? typed;
  if (input !== null && input !== $("model")) complain(error.message, input);
}

function saveConversation(question) {
  conversation.title ||= question.slice(0, TITLE_LEN);
  Object.assign(conversation, { model: $("model").value, changedMs: Date.now() });
  if (!keep(store.save(conversation))) {
    showLines($("notice"), ["This browser has no room for the conversation: a reload will forget it. Delete others."]);
  }
  if (openId() !== conversation.id) history.pushState(null, "", `#${conversation.id}`);
  drawConversations();
}

/** Return whether a value was stored. Images that had to make room are announced. */
function keep({ fits, removed }) {
  for (const { id, number } of removed) {
    if (id !== conversation.id) continue;
    turns[number]?.remark("The images are no longer kept across a reload: the conversations have become too large.");
  }
  return fits;
}

const filesOf = ({ urls, painted }) => ({ urls: urls ?? [], painted });

function show(kept, files) {
  const turn = new Turn(turns.length, kept, files, ACTS);
  turns.push(turn);
  $("turns").append(turn.element);
  $("empty").hidden = true;
  return turn;
}

/** Read the answer of a turn to its end. */
async function follow(turn, body, player = null) {
  const save = saver(turn);
  const run = new RUNS[turn.kept.kind](turn, headers(), save.soon, player);
  running = run;
  drawButtons();
  save.now();
  await run.read(body);
  save.now();
  drawButtons();
  return run;
}

/** Return functions that store a turn: at once, and within SAVE_MS however often it changes. */
function saver(turn) {
  const { id } = conversation;
  let timer = null;
  let numPainted = "";
  const now = () => {
    clearTimeout(timer);
    timer = null;
    // Another conversation is open, or this one was deleted.
    if (!turns.includes(turn) || store.get(id) === null) return;
    keep(store.saveTurn(id, turn.number, turn.kept));
    const painted = turn.painted.map((url) => url.length).join();
    if (painted !== numPainted) keep(store.saveFiles(id, turn.number, filesOf(turn)));
    numPainted = painted;
  };
  const soon = () => (timer ??= setTimeout(now, SAVE_MS));
  savePending = () => timer !== null && now();
  return { now, soon };
}

/** Show the conversation that the address names, or a new one, and continue its last answer. */
function open() {
  if (openId() === conversation.id) return;
  savePending();
  if (isBusy()) {
    if (store.get(conversation.id) === null) running.cancel();
    else running.leave();
  }
  running = null;
  turns = [];
  edit(null);
  $("turns").replaceChildren();
  showLines($("notice"), []);
  conversation = store.get(openId()) ?? newConversation();
  $("system").value = conversation.system;
  $("empty").hidden = false;
  if (MODELS[conversation.model] && !$("model").disabled) $("model").value = conversation.model;
  for (const { turn, files } of store.load(conversation.id)) finishTimeline(show(turn, files));
  drawModel();
  drawButtons();
  follower.toEnd();
  resume();
  if (HAS_MOUSE) $("question").focus();
}

/** An answer may be complete before its request is seen in the last stage. */
function finishTimeline(turn) {
  if (turn.busy || turn.kept.id === null || hasEnded(turn.kept.request?.state)) return;
  const run = new Run(turn, headers(), saver(turn).now);
  run.over = true;
  run.watch(0);
}

function resume() {
  const turn = turns.at(-1);
  if (turn?.busy && !isBusy()) follow(turn, null);
  for (const made of turns.filter((other) => other.lacksVideo)) {
    new Filming(made, headers(), () => {}).load().then(() => made.fail([]), (error) => made.fail(explain(error)));
  }
}

const model = () => MODELS[$("model").value] ?? { painter: null, files: Object.keys(ACCEPT), toy: false };
const isBusy = () => running !== null && !running.over;

function drawButtons() {
  $("send").disabled = isBusy() || $("model").disabled;
  $("cancel").hidden = !isBusy();
  $("turns").dataset.busy = isBusy();
}

// -- the next question ------------------------------------------------------------------------

/** Return the body of a request and the kind of its answer, or null after showing what is wrong. */
function compose(question, chosen, number) {
  if (question === "") return complain("Write a question first.", $("question"));
  clearFault($("more"));
  const more = readObject($("more"));
  if (more === null) return null;
  if (model().painter !== null) return composePainting(question, chosen, model().painter, more);
  for (const id of ["max-tokens", "temperature"]) {
    clearFault($(id));
    if (!$(id).checkValidity()) return complain($(id).validationMessage, $(id));
  }
  const unseen = chosen.find(({ kind }) => !model().files.includes(kind));
  if (unseen) return complain(`${$("model").value} cannot read ${unseen.name}: it takes no ${unseen.kind}.`, $("file"));
  const name = $("model").value;
  const parts = chosen.map((image) => partOf(image, image.url));
  const content = parts.length ? [...parts, { type: "text", text: question }] : question;
  const system = $("system").value.trim();
  const isSpoken = $("speak").checked && name in voices;
  const speech = { modalities: ["text", "audio"], audio: { voice: voices[name], format: "pcm16" } };
  const body = JSON.stringify({
    model: name,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...turns.slice(0, number).flatMap((turn) => turn.messages),
      { role: "user", content },
    ],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    durable: true,
    ...numberOf("max_tokens", $("max-tokens")),
    ...numberOf("temperature", $("temperature")),
    ...(isSpoken ? speech : {}),
    ...more,
  });
  if (body.length <= LIMITS.maxBodyBytes) return { body, player: isSpoken ? new Player() : null };
  const limit = `${LIMITS.maxBodyBytes / MIB} MiB`;
  return complain(`The conversation with its images exceeds the limit of ${limit}. Start a new conversation.`, $("question"));
}

function composePainting(question, chosen, { kind, input_images: limit }, more) {
  const count = chosen.length;
  if (limit === 0 && count) {
    return complain(`This model makes ${kind === "video" ? "videos" : "images"} of a text, and takes no files.`, $("question"));
  }
  if (chosen.some((image) => image.kind !== "image")) {
    return complain("This model edits images, and takes no other files.", $("file"));
  }
  if (limit && !(count >= 1 && count <= limit)) {
    return complain(`This model edits ${limit === 1 ? "one image" : `1 to ${limit} images`}, not ${count}: add files.`, $("file"));
  }
  const values = parameters.values();
  if (values === null) return null;
  const name = $("model").value;
  const fields = { ...values, ...more };
  if (kind === "video") return { kind, body: JSON.stringify({ model: name, prompt: question, ...fields }) };
  const body = bodyOf(name, question, chosen, fields);
  if (body.length <= LIMITS.maxBodyBytes) return { kind: limit ? "edit" : "image", body };
  return complain(`The images exceed the limit of ${LIMITS.maxBodyBytes / MIB} MiB.`, $("file"));
}

const numberOf = (name, input) => (input.value === "" ? {} : { [name]: input.valueAsNumber });

// -- the server -------------------------------------------------------------------------------

async function loadModels() {
  const response = await fetch(`${ROOT}v1/models`, { headers: headers() });
  if (response.status === 401) {
    if ($("model").innerText !== KEY_REQUIRED) $("settings").togglePopover(true);
    offer([], KEY_REQUIRED);
    return;
  }
  if (!response.ok) throw await refusal(response);
  const spoken = await fetch(`${ROOT}v1/audio/voices`, { headers: headers() });
  const known = spoken.ok ? (await spoken.json()).data : [];
  voices = Object.fromEntries(known.reverse().map((voice) => [voice.model, voice.id]));
  if ($("model").innerText === KEY_REQUIRED) $("settings").togglePopover(false);
  offer((await response.json()).data.map(({ id }) => id), "no model is served");
}

function offer(names, otherwise) {
  const select = $("model");
  const wanted = [conversation.model, select.value].find((name) => names.includes(name));
  const option = (name) => new Option(MODELS[name]?.toy ? `${name} (toy)` : name, name);
  select.replaceChildren(...(names.length ? names.map(option) : [new Option(otherwise, "")]));
  if (wanted) select.value = wanted;
  select.disabled = names.length === 0;
  drawButtons();
  drawModel();
}

/** Show the controls that the chosen model has. */
function drawModel() {
  const { painter, files } = model();
  const kinds = painter === null ? files : painter.input_images ? ["image"] : [];
  $("speech").hidden = !($("model").value in voices);
  $("attach").hidden = kinds.length === 0;
  recorder.show(kinds.includes("audio"));
  $("file").accept = kinds.map((kind) => ACCEPT[kind]).join();
  $("file-hint").textContent = `Files of these kinds: ${kinds.join(", ")}.`;
  for (const field of document.querySelectorAll(".of-text")) field.hidden = painter !== null;
  parameters.show(painter);
  if (!$("model").disabled) showExamples($("model").value, model(), askExample);
}

async function askExample(question, files) {
  images.replace([]);
  images.add(files);
  await images.added;
  $("question").value = question;
  submit();
}

async function pollHealth() {
  try {
    const { ok } = await fetch(`${ROOT}ready`);
    drawHealth(ok ? "ready" : "away", ok ? "Ready" : "Not ready");
    if ($("model").disabled) await loadModels();
  } catch {
    drawHealth("away", "Not reachable");
  }
  setTimeout(pollHealth, HEALTH_MS);
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!$("send").disabled) $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isBusy() && !isCovered()) running.cancel();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // The address names the conversation.
  $("question").focus();
});
$("model").addEventListener("change", drawModel);
$("cancel").addEventListener("click", () => running?.cancel());
$("keep").addEventListener("click", () => edit(null));
$("system").addEventListener("change", () => {
  conversation.system = $("system").value;
  if (store.get(conversation.id) !== null) keep(store.save(conversation));
});
$("key").addEventListener("change", () => {
  loadModels().then(resume, (error) => showLines($("notice"), explain(error)));
});
addEventListener("hashchange", open);
addEventListener("pagehide", () => savePending());
open();
drawButtons();
pollHealth();
