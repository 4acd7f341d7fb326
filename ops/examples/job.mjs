// Queue a job for Pagemill with the official NATS client, leave, and fetch the answer later.
//
// node job.mjs ask "What can you do?"          queues a question, and prints the id of the job
// node job.mjs paint "a red circle on blue"    queues an image, and prints the id of the job
// node job.mjs read ID                         prints the answer to a question
// node job.mjs save ID FILE                    writes an image to a file
import { randomUUID } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";
import { connect, nkeyAuthenticator } from "@nats-io/transport-node";

const [command, text, file] = process.argv.slice(2);
// The key of a tenant, which is signed with and never sent.
const key = process.env.NATS_NKEY ?? "data/nats/keys/tenants/local.nk";
const servers = process.env.NATS_URL ?? "nats://127.0.0.1:4222";
const nc = await open().catch((error) => {
  console.error(`cannot connect to ${servers} with the key ${key}: ${error.message}`);
  process.exit(1);
});

async function open() {
  const authenticator = key ? nkeyAuthenticator(readFileSync(key)) : undefined;
  return connect({ servers, authenticator });
}

async function queue(request) {
  const job = randomUUID();
  // The acknowledgement of this publish means that the job is on the broker's disk.
  await call(`pm.request.demo.${job}`, request);
  return job;
}

async function call(subject, query) {
  const page = (await nc.request(subject, JSON.stringify(query), { timeout: 10000 })).json();
  if (page.error) throw new Error(page.error.message ?? page.error.description);
  return page;
}

// Yield all records of an output, page by page, and wait for those that are not there yet.
async function* records(job, output = "text") {
  let page = { next: 0, ended: false };
  while (!page.ended) {
    page = await call(`pm.read.${job}`, { from: page.next, output });
    for (const record of page.records) {
      if (record.type === "error") throw new Error(record.error.message);
      yield record;
    }
    if (page.records.length === 0) await pause(500);
  }
}

async function read(job) {
  for await (const record of records(job)) {
    for (const choice of record.choices ?? []) process.stdout.write(choice.text);
  }
  process.stdout.write("\n");
}

async function save(job, file) {
  for await (const _ of records(job)); // The last record is the end of the job, or its error.
  for await (const record of records(job, "image")) {
    if (record.type !== "image") continue; // A record of the progress.
    const name = record.media.replace("media:", "");
    const parts = [];
    let page = { next: 0, ended: false };
    while (!page.ended) {
      page = await call(`pm.file.${name}`, { from: page.next });
      parts.push(Buffer.from(page.data, "base64"));
    }
    writeFileSync(file, Buffer.concat(parts));
  }
}

const commands = {
  ask: async () => console.log(
    await queue({ model: "demo", messages: [{ role: "user", content: text }] })),
  paint: async () => console.log(await queue({ model: "demo", prompt: text, outputs: ["image"] })),
  read: () => read(text),
  save: () => save(text, file),
};
try {
  if (!text || !commands[command]) throw new Error("usage: node job.mjs ask|paint|read|save ...");
  await commands[command]();
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
await nc.close();
