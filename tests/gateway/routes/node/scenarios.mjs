// The official `openai` package of npm against a gateway: node scenarios.mjs NAME, in test_openai_node.py.
// BASE_URL is the gateway's, IMAGE a data: URL of a yellow star. KEY may have one request at a time.
import assert from "node:assert/strict";

import OpenAI from "openai";

const { BASE_URL, IMAGE, KEY } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY ?? "none", maxRetries: 0 });
const hello = [{ role: "developer", content: "Be brief." }, { role: "user", content: "Hello" }];
const messages = [
  {
    role: "user",
    content: [
      { type: "image_url", image_url: { url: IMAGE } },
      { type: "text", text: "What colour is it?" },
    ],
  },
];
const compact = { "x-guidance": { whitespace_flexible: false } }; // the demo model likes spaces
const paint = {
  type: "function",
  function: {
    name: "paint",
    parameters: {
      type: "object",
      properties: { colour: { enum: ["red", "blue"] } },
      required: ["colour"],
      additionalProperties: false,
    },
  },
};
const create = (fields, options) => client.chat.completions.create({ model: "demo", ...fields }, options);

const scenarios = {
  async chat() {
    const answer = await create({ messages: hello, max_completion_tokens: 8, n: 2, logprobs: true });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    assert.ok(answer.choices[0].logprobs.content.length > 0);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    const models = [];
    for await (const model of client.models.list()) models.push(model.id);
    assert.deepEqual(models, ["demo"]);
    const text = await client.completions.create({ model: "demo", prompt: "Hello", max_tokens: 4 });
    assert.equal(text.usage.completion_tokens, 4);
  },

  async embeddings() {
    const input = ["Hello", "Hello there"];
    const [packed, plain] = await Promise.all([
      client.embeddings.create({ model: "demo", input }), // The client asks for base64.
      client.embeddings.create({ model: "demo", input, encoding_format: "float" }),
    ]);
    assert.deepEqual(packed.data.map((one) => one.index), [0, 1]);
    packed.data.forEach(({ embedding }, i) => {
      assert.ok(Math.abs(Math.hypot(...embedding) - 1) < 1e-5);
      assert.ok(embedding.every((value, j) => Math.abs(value - plain.data[i].embedding[j]) < 1e-6));
    });
  },

  async stream() {
    const fields = { messages, stream: true, stream_options: { include_usage: true } };
    let text = "";
    let last;
    for await (const chunk of await create(fields)) {
      text += chunk.choices[0]?.delta.content ?? "";
      last = chunk;
    }
    assert.match(text, /yellow/);
    assert.ok(last.usage.completion_tokens > 0);
    const runner = client.chat.completions.stream({ model: "demo", messages });
    assert.equal(await runner.finalContent(), text);
  },

  async image() {
    const answer = await create({ messages });
    assert.match(answer.choices[0].message.content, /yellow/);
    assert.equal(answer.choices[0].finish_reason, "stop");
  },

  async tools() {
    const fields = {
      messages,
      tools: [paint],
      tool_choice: { type: "function", function: { name: "paint" } },
      max_tokens: 200,
    };
    const answer = await create(fields);
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    assert.equal(call.function.name, "paint");
    const given = JSON.parse(call.function.arguments);
    assert.ok(["red", "blue"].includes(given.colour));
    const runner = client.chat.completions.stream({ model: "demo", ...fields });
    const streamed = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
    assert.deepEqual(JSON.parse(streamed.function.arguments), given);
  },

  async json_schema() {
    const schema = {
      type: "object",
      properties: { colour: { enum: ["red", "yellow"] }, round: { type: "boolean" } },
      required: ["colour", "round"],
      additionalProperties: false,
      ...compact,
    };
    const format = { type: "json_schema", json_schema: { name: "shape", schema, strict: true } };
    const answer = await client.chat.completions.parse({
      model: "demo",
      messages,
      response_format: format,
      max_tokens: 200,
    });
    const shape = JSON.parse(answer.choices[0].message.content);
    assert.deepEqual(Object.keys(shape).sort(), ["colour", "round"]);
    assert.equal(typeof shape.round, "boolean");
  },

  async errors() {
    await assert.rejects(create({ model: "other", messages: hello }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      assert.equal(error.code, "unknown_model");
      assert.ok(error.requestID === null || typeof error.requestID === "string");
      return true;
    });
    await assert.rejects(create({ messages: hello, temperature: 9 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
    const broken = [{ type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } }];
    await assert.rejects(
      create({ messages: [{ role: "user", content: broken }], stream: true }),
      OpenAI.UnprocessableEntityError,
    );
    await assert.rejects(client.moderations.create({ input: "x" }), OpenAI.NotFoundError);
  },

  async retries() {
    const stranger = new OpenAI({ baseURL: BASE_URL, apiKey: "pm-wrong", maxRetries: 0 });
    await assert.rejects(async () => stranger.models.list(), OpenAI.AuthenticationError);
    const long = { messages: hello, stream: true, max_tokens: 900, ignore_eos: true };
    const busy = await create(long);
    await assert.rejects(create({ messages: hello }), OpenAI.RateLimitError);
    busy.controller.abort();
    // The client is asked to retry in a second, and does.
    const first = await create({ ...long, max_tokens: 60 }, { maxRetries: 9 });
    const waited = await create({ messages: hello, max_tokens: 2 }, { maxRetries: 9 });
    assert.equal(waited.usage.completion_tokens, 2);
    first.controller.abort();
  },

  async cancel() {
    const long = { messages: hello, stream: true, max_tokens: 900, ignore_eos: true };
    const { data: stream, response } = await create(long).withResponse();
    const id = response.headers.get("x-request-id");
    for await (const _ of stream) break; // which aborts it
    let request = { state: "" };
    while (!["finished", "cancelled", "failed"].includes(request.state)) {
      request = await client.get(`/requests/${id}`);
    }
    assert.equal(request.state, "cancelled");
  },
};

await scenarios[process.argv[2]]();
