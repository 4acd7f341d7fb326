// Ask Pagemill with the official NATS client, disconnect, and read the answer: node again.mjs "Hello"
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";
import { connect, nkeyAuthenticator } from "@nats-io/transport-node";

// The key of a tenant, which is signed with and never sent.
const key = process.env.NATS_NKEY ?? "data/nats/keys/tenants/local.nk";
const open = () => connect({
  servers: process.env.NATS_URL ?? "nats://127.0.0.1:4222",
  authenticator: key ? nkeyAuthenticator(readFileSync(key)) : undefined,
});

async function publish(question) {
  const nc = await open();
  const request = { model: "demo", messages: [{ role: "user", content: question }] };
  const requestId = randomUUID();
  // The acknowledgement of this publish means that the request is on the broker's disk.
  await nc.request(`pm.request.demo.${requestId}`, JSON.stringify(request), { timeout: 5000 });
  await nc.close();
  return requestId;
}

// Yield the records of an answer from number `start` on: the stored ones, then live ones.
async function* read(nc, requestId, start = 0) {
  // Subscribed before the stored records are read, so that each later one is live.
  const live = nc.subscribe(`pm.tokens.${requestId}`)[Symbol.asyncIterator]();
  let coming = live.next();
  for (;;) {
    const query = JSON.stringify({ from: start });
    const reply = await nc.request(`pm.read.${requestId}`, query, { timeout: 10000 });
    const page = reply.json();
    if (page.error) throw new Error(page.error.message);
    yield* page.records;
    start = page.next;
    if (page.ended) return;
    while (page.records.length === 0) {
      // Without a live record for some seconds, the stored ones are read again.
      const message = await Promise.race([coming, pause(5000)]);
      if (message === undefined) break;
      coming = live.next();
      const record = message.value.json();
      if (record.index > start) break; // Records have been missed.
      if (record.index < start) continue;
      yield record;
      start += 1;
      if (record.type !== "tokens") return;
    }
  }
}

const requestId = await publish(process.argv[2]);
console.error(`${requestId}: published, and disconnected`);
const nc = await open();
let failed = false;
for await (const record of read(nc, requestId)) {
  for (const choice of record.choices ?? []) process.stdout.write(choice.text);
  failed = record.type === "error";
  if (failed) process.stdout.write(record.error.message);
}
process.stdout.write("\n");
await nc.close();
process.exit(failed ? 1 : 0);
