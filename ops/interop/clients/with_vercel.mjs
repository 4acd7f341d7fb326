// The AI SDK of Vercel: `ai` with `@ai-sdk/openai-compatible`, and with `@ai-sdk/openai` where that has no model.
import { readFileSync } from "node:fs";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  embedMany, generateImage, generateSpeech, generateText, jsonSchema, Output, streamText, tool, transcribe,
} from "ai";

import { CASES, failureOf, report } from "./common.mjs";

const pagemill = createOpenAICompatible({
  name: "pagemill",
  baseURL: process.env.OPENAI_BASE_URL,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI();
const file = { type: "file", data: CASES.image, mediaType: "image/png" };
const messages = [{ role: "user", content: [file, { type: "text", text: CASES.question }] }];
const ASK = { model: pagemill("demo"), messages, temperature: 0, maxRetries: 0 };
const LONG = { ...ASK, model: pagemill("endless") };
const { name, description, parameters } = CASES.tool;
const tools = { [name]: tool({ description, inputSchema: jsonSchema(parameters) }) };
const CALL = { ...ASK, tools, toolChoice: "required" };

await report({
  chat: async () => (await generateText(ASK)).text,
  stream: () => streamText(ASK).text,

  async tools() {
    const first = await generateText(CALL);
    const [{ toolCallId, toolName, input }] = first.toolCalls;
    const output = { type: "text", value: CASES.tool_result };
    const result = { role: "tool", content: [{ type: "tool-result", toolCallId, toolName, output }] };
    const after = await generateText({ ...ASK, messages: [...messages, ...first.response.messages, result], tools });
    return [input, after.text];
  },
  streamed_tools: async () => (await streamText(CALL).toolCalls)[0].input,

  async structured() {
    const output = Output.object({ schema: jsonSchema(CASES.schema) });
    return (await generateText({ ...ASK, output })).output;
  },

  async embeddings() {
    const { embeddings } = await embedMany({ model: pagemill.embeddingModel("demo"), values: CASES.inputs });
    return [embeddings.length, embeddings.at(-1)];
  },

  async speech() {
    const ask = { model: openai.speech("demo"), voice: "alloy", text: CASES.text, outputFormat: "wav" };
    return (await generateSpeech(ask)).audio.uint8Array.length;
  },

  transcription: async () => (await transcribe({ model: openai.transcription("hearing"), audio: readFileSync(CASES.recording) })).text,

  async image() {
    const { image } = await generateImage({ model: pagemill.imageModel("demo"), prompt: CASES.prompt });
    return image.base64.slice(0, 32);
  },

  async responses() {
    const question = { role: "user", content: CASES.text };
    const ask = { model: openai.responses("demo"), messages: [question], maxRetries: 0 };
    const first = await generateText(ask);
    // The client sends the first answer as the id of its item.
    const second = await generateText({ ...ask, messages: [question, ...first.response.messages, question] });
    return [first.text, await streamText(ask).text, second.text];
  },

  failures: () => Promise.all([{ model: pagemill("other") }, { temperature: 9 }].map((fields) => failureOf(() => generateText({ ...ASK, ...fields })))),
  timeout: () => failureOf(() => generateText({ ...LONG, headers: CASES.timeout, timeout: 500 })),

  async cancel() {
    const controller = new AbortController();
    const { textStream } = streamText({ ...LONG, headers: CASES.cancel, abortSignal: controller.signal });
    for await (const _ of textStream) break;
    controller.abort();
  },
});
