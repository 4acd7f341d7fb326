// The `openai` package of npm.
import { createReadStream } from "node:fs";

import OpenAI, { toFile } from "openai";

import { CASES, failureOf, report } from "./common.mjs";

const { messages, schema, text } = CASES;
const ASK = { model: "demo", messages, temperature: 0 };
const LONG = { ...ASK, model: "endless" };
const tools = [{ type: "function", function: CASES.tool }];
const client = new OpenAI({ maxRetries: 0 });
const create = (fields, options) => client.chat.completions.create({ ...ASK, ...fields }, options);
const textOf = async (fields) => (await create(fields)).choices[0].message.content;

await report({
  chat: textOf,
  stream: () => client.chat.completions.stream(ASK).finalContent(),

  async tools() {
    const { message } = (await create({ tools, tool_choice: "required" })).choices[0];
    const [call] = message.tool_calls;
    const result = { role: "tool", tool_call_id: call.id, content: CASES.tool_result };
    const after = await textOf({ messages: [...messages, message, result], tools });
    return [JSON.parse(call.function.arguments), after];
  },

  async streamed_tools() {
    const stream = client.chat.completions.stream({ ...ASK, tools, tool_choice: "required" });
    const [call] = (await stream.finalMessage()).tool_calls;
    return JSON.parse(call.function.arguments);
  },

  async structured() {
    const json_schema = { name: "shape", schema, strict: true };
    return JSON.parse(await textOf({ response_format: { type: "json_schema", json_schema } }));
  },

  async embeddings() {
    const { data } = await client.embeddings.create({ model: "demo", input: CASES.inputs });
    return [data.length, data.at(-1).embedding];
  },

  async speech() {
    const fields = { model: "demo", voice: "alloy", input: text, response_format: "wav" };
    return (await (await client.audio.speech.create(fields)).arrayBuffer()).byteLength;
  },

  async transcription() {
    const file = createReadStream(CASES.recording);
    return (await client.audio.transcriptions.create({ model: "hearing", file })).text;
  },

  image: async () => (await client.images.generate({ model: "demo", prompt: CASES.prompt })).data[0].b64_json.slice(0, 32),

  async responses() {
    const fields = { model: "demo", input: text };
    const first = await client.responses.create(fields);
    const streamed = await client.responses.stream(fields).finalResponse();
    const second = await client.responses.create({ ...fields, previous_response_id: first.id });
    return [first.output_text, streamed.output_text, second.output_text];
  },

  async batch() {
    const file = await toFile(Buffer.from(CASES.lines), "lines.jsonl");
    const { id } = await client.files.create({ file, purpose: "batch" });
    const order = { input_file_id: id, endpoint: "/v1/chat/completions", completion_window: "24h" };
    let job = await client.batches.create(order);
    while (!["completed", "failed"].includes(job.status)) job = await client.batches.retrieve(job.id);
    const output = await (await client.files.content(job.output_file_id)).text();
    return output.split('"status_code":200').length - 1;
  },

  failures: () => Promise.all([{ model: "other" }, { temperature: 9 }].map((fields) => failureOf(() => textOf(fields)))),
  timeout: () => failureOf(() => create(LONG, { timeout: 500, headers: CASES.timeout })),

  async cancel() {
    for await (const _ of await create({ ...LONG, stream: true }, { headers: CASES.cancel })) break;
  },
});
