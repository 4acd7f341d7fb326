// Publish a request under each of several ids with the official client, and print what comes back.
import { readFileSync } from "node:fs";
import { connect, nkeyAuthenticator } from "@nats-io/transport-node";

const { NATS_URL, NATS_NKEY, BODY, IDS } = process.env;
const nc = await connect({
  servers: NATS_URL,
  // On a busy machine, the server may close a connection before the login is computed.
  waitOnFirstConnect: true,
  authenticator: nkeyAuthenticator(readFileSync(NATS_NKEY).subarray(0, 58)),
});

async function ask(id) {
  const live = nc.subscribe(`pm.tokens.${id}`);
  const answer = { id, text: "", code: "", field: "", refused: "" };
  try {
    const reply = await nc.request(`pm.request.demo.${id}`, BODY, { timeout: 60_000 });
    answer.refused = reply.json().error?.description ?? "";
  } catch (error) {
    answer.refused = error.message;
  }
  if (answer.refused) return answer;
  for await (const message of live) {
    const record = message.json();
    for (const choice of record.choices ?? []) answer.text += choice.text;
    if (record.type === "tokens") continue;
    answer.code = record.error?.code ?? "";
    answer.field = record.error?.field ?? "";
    break;
  }
  return answer;
}

console.log(JSON.stringify(await Promise.all(JSON.parse(IDS).map(ask))));
await nc.close();
