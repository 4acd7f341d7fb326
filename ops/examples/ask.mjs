// Ask Pagemill with the official NATS client: node ask.mjs "What can you do?" [image.png ...]
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect, nkeyAuthenticator } from "@nats-io/transport-node";

const [question, ...images] = process.argv.slice(2);
// The key of a tenant, which is signed with and never sent.
const key = process.env.NATS_NKEY ?? "data/nats/keys/tenants/local.nk";
const nc = await connect({
  servers: process.env.NATS_URL ?? "nats://127.0.0.1:4222",
  authenticator: key ? nkeyAuthenticator(readFileSync(key)) : undefined,
});
const requestId = randomUUID();
// Subscribed before the request is published, so that no record is missed.
const log = nc.subscribe(`pm.tokens.${requestId}`);
const content = [{ type: "text", text: question }];
for (const image of images) {
  const url = "data:image/png;base64," + readFileSync(image).toString("base64");
  content.push({ type: "image_url", image_url: { url } });
}
const request = { model: "demo", messages: [{ role: "user", content }] };
// The acknowledgement of this publish means that the request is on the broker's disk.
await nc.request(`pm.request.demo.${requestId}`, JSON.stringify(request), { timeout: 5000 });
let failed = false;
for await (const message of log) {
  const record = message.json();
  for (const choice of record.choices ?? []) process.stdout.write(choice.text);
  if (record.type === "tokens") continue;
  failed = record.type === "error";
  process.stdout.write(failed ? `${record.error.message}\n` : "\n");
  break;
}
await nc.close();
process.exit(failed ? 1 : 0);
