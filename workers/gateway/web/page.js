// The page: a conversation that uses the public API alone.

import { $, headers, showLines } from "./elements.js";
import { Images } from "./images.js";
import { Recorder } from "./recorder.js";
import { partOf } from "./media.js";
import { Filming } from "./filming.js";
import { Editing, Painting, bodyOf } from "./painting.js";
import { Parameters } from "./parameters.js";
import { LIMITS, PAINTERS } from "./pipeline.js";
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
const RUNS = { text: Run, image: Painting, edit: Editing, video: Filming };

const images = new Images($("drop"), $("file"), $("images"), (faults) => showLines($("notice"), faults));
new Recorder($("record"), (files) => images.add(files), (faults) => showLines($("notice"), faults));
const parameters = new Parameters($("painting"));
const follower = new Follower($("log"), $("turns"), $("to-end"));
let turns = [];
let voices = {}; // the first voice of each model that speaks
let running = null;
let savePending = () => {};

// -- the conversation -------------------------------------------------------------------------

async function submit() {
  await images.added;
  if (isBusy()) return;
  const asked = compose();
  if (asked === null) return;
  const kept = newTurn(asked.question, images.chosen, asked.kind ?? "text");
  const turn = show(kept, images.chosen.map(({ url }) => url));
  if (turn.urls.length && !store.saveImages(turn.number, turn.urls)) {
    turn.remark("The images are too large to be kept across a reload.");
  }
  const sent = images.chosen;
  images.replace([]);
  $("question").value = "";
  showLines($("notice"), []);
  follower.toEnd();
  const { error } = await follow(turn, asked.body, asked.player);
  if (error?.field && asked.kind) parameters.refuse(error);
  const isEmpty = $("question").value === "" && images.chosen.length === 0;
  if (kept.state !== "failed" || turn.messages.length || !isEmpty || !turns.includes(turn)) return;
  $("question").value = kept.question;
  images.replace(sent);
}

function show(kept, urls) {
  const turn = new Turn(turns.length, kept, urls);
  turns.push(turn);
  $("turns").append(turn.element);
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
  let timer = null;
  const now = () => {
    clearTimeout(timer);
    timer = null;
    if (!turns.includes(turn)) return; // A new conversation has begun.
    for (const number of store.saveTurn(turn.number, turn.kept)) {
      turns[number].remark("The images are no longer kept across a reload: the conversation has become too large.");
    }
  };
  const soon = () => (timer ??= setTimeout(now, SAVE_MS));
  savePending = () => timer !== null && now();
  return { now, soon };
}

/** Show the conversation that this tab had before it was loaded again, and continue its last answer. */
function restore() {
  for (const { turn: kept, urls } of store.load()) {
    finishTimeline(show(kept, urls));
  }
  resume();
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

function startAnew() {
  if (isBusy()) running.cancel();
  running = null;
  turns = [];
  store.clear();
  $("turns").replaceChildren();
  showLines($("notice"), []);
  drawButtons();
  $("question").focus();
}

const painter = () => PAINTERS[$("model").value] ?? null;
const isBusy = () => running !== null && !running.over;

function drawButtons() {
  $("send").disabled = isBusy() || $("model").disabled;
  $("cancel").hidden = !isBusy();
  $("new").disabled = turns.length === 0;
}

// -- the next question ------------------------------------------------------------------------

/** Return the question and the request's body, or null after showing what is wrong. */
function compose() {
  const question = $("question").value.trim();
  if (question === "") return complain("Write a question first.", $("question"));
  let more = {};
  try {
    more = JSON.parse($("more").value.trim() || "{}");
  } catch (error) {
    return complain(`The parameters are not JSON: ${error.message}`, $("more"));
  }
  if (more === null || typeof more !== "object" || Array.isArray(more)) {
    return complain("The parameters must be one JSON object.", $("more"));
  }
  if (painter() !== null) return composePainting(question, painter(), more);
  for (const id of ["max-tokens", "temperature"]) {
    if (!$(id).checkValidity()) return complain($(id).validationMessage, $(id));
  }
  const parts = images.chosen.map((image) => partOf(image, image.url));
  const content = parts.length ? [...parts, { type: "text", text: question }] : question;
  const model = $("model").value;
  const isSpoken = $("speak").checked && model in voices;
  const speech = { modalities: ["text", "audio"], audio: { voice: voices[model], format: "pcm16" } };
  const body = JSON.stringify({
    model,
    messages: [...turns.flatMap((turn) => turn.messages), { role: "user", content }],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    durable: true,
    ...number("max_tokens", $("max-tokens")),
    ...number("temperature", $("temperature")),
    ...(isSpoken ? speech : {}),
    ...more,
  });
  if (body.length <= LIMITS.maxBodyBytes) return { question, body, player: isSpoken ? new Player() : null };
  const limit = `${LIMITS.maxBodyBytes / MIB} MiB`;
  return complain(`The conversation with its images exceeds the limit of ${limit}. Start a new conversation.`, $("new"));
}

function composePainting(question, { kind, input_images: limit }, more) {
  const count = images.chosen.length;
  if (limit === 0 && count) {
    return complain(`This model makes ${kind === "video" ? "videos" : "images"} of a text, and takes no files.`, $("question"));
  }
  if (images.chosen.some((image) => image.kind !== "image")) {
    return complain("This model edits images, and takes no other files.", $("file"));
  }
  if (limit && !(count >= 1 && count <= limit)) {
    return complain(`This model edits ${limit === 1 ? "one image" : `1 to ${limit} images`}, not ${count}: add files.`, $("file"));
  }
  const values = parameters.values();
  if (values === null) return null;
  const model = $("model").value;
  const fields = { ...values, ...more };
  if (kind === "video") return { question, kind, body: JSON.stringify({ model, prompt: question, ...fields }) };
  const body = bodyOf(model, question, images.chosen, fields);
  if (body.length <= LIMITS.maxBodyBytes) return { question, kind: limit ? "edit" : "image", body };
  return complain(`The images exceed the limit of ${LIMITS.maxBodyBytes / MIB} MiB.`, $("file"));
}

function complain(text, input) {
  showLines($("notice"), [text]);
  input.closest("details")?.setAttribute("open", "");
  input.focus();
  return null;
}

const number = (name, input) => (input.value === "" ? {} : { [name]: input.valueAsNumber });

// -- the server -------------------------------------------------------------------------------

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    offer([], "API key required");
    $("settings").open = true;
    return;
  }
  if (!response.ok) throw await refusal(response);
  const spoken = await fetch("v1/audio/voices", { headers: headers() });
  const known = spoken.ok ? (await spoken.json()).data : [];
  voices = Object.fromEntries(known.reverse().map((voice) => [voice.model, voice.id]));
  offer((await response.json()).data.map((model) => model.id), "no model is served");
}

function offer(names, otherwise) {
  const select = $("model");
  const chosen = select.value;
  select.replaceChildren(...(names.length ? names.map((name) => new Option(name, name)) : [new Option(otherwise, "")]));
  if (names.includes(chosen)) select.value = chosen;
  select.disabled = names.length === 0;
  drawButtons();
  drawModel();
}

/** Show the controls that the chosen model has. */
function drawModel() {
  $("speech").hidden = !($("model").value in voices);
  for (const field of document.querySelectorAll(".of-text")) field.hidden = painter() !== null;
  parameters.show(painter());
}

async function pollHealth() {
  const health = $("health");
  const draw = (state, text) => {
    health.dataset.state = state;
    if (health.textContent !== text) health.textContent = text;
  };
  try {
    const { ok } = await fetch("ready");
    draw(ok ? "ready" : "away", ok ? "Ready" : "Not ready");
    if ($("model").disabled) await loadModels();
  } catch {
    draw("away", "Not reachable");
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
  if (event.key === "Escape" && isBusy()) running.cancel();
});
$("model").addEventListener("change", drawModel);
$("cancel").addEventListener("click", () => running?.cancel());
$("new").addEventListener("click", startAnew);
$("key").addEventListener("change", () => {
  loadModels().then(resume, (error) => showLines($("notice"), explain(error)));
});
addEventListener("pagehide", () => savePending());
restore();
drawButtons();
pollHealth();
