// Batches with the official `openai` package of npm: node batches.mjs, in tests/gateway/batches.
import assert from "node:assert/strict";

import OpenAI, { toFile } from "openai";

const { BASE_URL, MODEL } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const endpoint = "/v1/chat/completions";
const url = endpoint;
const messages = [{ role: "user", content: "Hello" }];
const lineOf = (id, fields = {}) => ({ custom_id: id, method: "POST", url, body: { model: MODEL, messages, ...fields } });
const ids = ["a", "b", "c"];

async function begin(lines, fields = {}) {
  const content = Buffer.from(lines.map((line) => `${JSON.stringify(line)}\n`).join(""));
  const file = await client.files.create({
    file: await toFile(content, "lines.jsonl"),
    purpose: "batch",
    expires_after: { anchor: "created_at", seconds: 90_000 },
  });
  assert.equal(file.expires_at, file.created_at + 90_000);
  assert.equal((await client.files.waitForProcessing(file.id)).status, "processed");
  return client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h", ...fields });
}

async function ended({ id }) {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const metadata = { job: "1" };
const expiry = { output_expires_after: { anchor: "created_at", seconds: 3600 } };
const lines = [...ids.map((id) => lineOf(id)), lineOf("d", { temperature: -1 })];
const batch = await ended(await begin(lines, { metadata, ...expiry }));
assert.equal(batch.status, "completed");
assert.deepEqual(batch.request_counts, { total: 4, completed: 3, failed: 1 });
assert.deepEqual(batch.metadata, metadata);
assert.ok(batch.usage.total_tokens > 0);
const text = await (await client.files.content(batch.output_file_id)).text();
const answers = text.trim().split("\n").map((line) => JSON.parse(line));
assert.deepEqual(answers.map((answer) => answer.custom_id).sort(), ids);
const errors = await (await client.files.content(batch.error_file_id)).text();
assert.equal(JSON.parse(errors).response.body.error.param, "temperature");
const output = await client.files.retrieve(batch.output_file_id);
assert.equal(output.expires_at, batch.expires_at + 3600);

const failed = await ended(await begin([lineOf("a"), lineOf("a")]));
assert.equal(failed.status, "failed");
assert.deepEqual(failed.errors.data.map(({ code, line }) => [code, line]), [["duplicate_custom_id", 2]]);

const listed = [];
for await (const one of client.batches.list({ limit: 1 })) listed.push(one.id);
assert.deepEqual(listed.slice(0, 2), [failed.id, batch.id]);
assert.equal((await client.batches.cancel(batch.id)).status, "completed");
assert.ok((await client.files.delete(batch.output_file_id)).deleted);
await assert.rejects(client.files.content(batch.output_file_id), OpenAI.NotFoundError);
