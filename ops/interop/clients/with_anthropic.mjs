// The `@anthropic-ai/sdk` package of npm.
import Anthropic from "@anthropic-ai/sdk";

import { CASES, failureOf, report } from "./common.mjs";

const source = { type: "base64", media_type: "image/png", data: CASES.image.split(",")[1] };
const content = [{ type: "image", source }, { type: "text", text: CASES.question }];
const messages = [{ role: "user", content }];
const { name, description, parameters } = CASES.tool;
const tools = [{ name, description, input_schema: parameters }];
const ASK = { model: "demo", max_tokens: 64, messages };
const CALL = { ...ASK, tools, tool_choice: { type: "any" } };
const LONG = { ...ASK, model: "endless", max_tokens: 3000 };
const client = new Anthropic({ maxRetries: 0 });
const create = (fields, options) => client.messages.create({ ...ASK, ...fields }, options);
const textOf = async (fields) => (await create(fields)).content[0].text;

await report({
  chat: textOf,

  stream: () => client.messages.stream(ASK).finalText(),

  async tools() {
    const first = await create(CALL);
    const [call] = first.content;
    const result = { type: "tool_result", tool_use_id: call.id, content: CASES.tool_result };
    const turns = [{ role: "assistant", content: first.content }, { role: "user", content: [result] }];
    return [call.input, await textOf({ messages: [...messages, ...turns], tools })];
  },

  streamed_tools: async () => (await client.messages.stream(CALL).finalMessage()).content[0].input,

  async structured() {
    const format = { type: "json_schema", schema: CASES.schema };
    return JSON.parse(await textOf({ output_config: { format } }));
  },

  tokens: async () => (await client.messages.countTokens({ model: "demo", messages })).input_tokens,

  failures: () => Promise.all([{ model: "other" }, { max_tokens: -1 }].map((fields) => failureOf(() => textOf(fields)))),

  timeout: () => failureOf(() => create(LONG, { timeout: 500, headers: CASES.timeout })),

  async cancel() {
    for await (const _ of await create({ ...LONG, stream: true }, { headers: CASES.cancel })) break;
  },
});
