"""Ask Pagemill with a stock NATS client: python ask.py "What can you do?" [image.png ...]"""

import asyncio
import base64
import json
import os
import pathlib
import sys
import uuid

import nats

# The key of a tenant signs, and is never sent. An empty name is for a broker without keys.
KEY = os.environ.get("NATS_NKEY", "data/nats/keys/tenants/local.nk")


async def main(question: str, *images: str) -> None:
    url = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
    nc = await nats.connect(url, nkeys_seed=KEY or None)
    request_id = uuid.uuid4().hex
    # Subscribed before the request is published, so that no record is missed.
    log = await nc.subscribe(f"pm.tokens.{request_id}")
    content: list[dict[str, object]] = [{"type": "text", "text": question}]
    for data in map(pathlib.Path.read_bytes, map(pathlib.Path, images)):
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": content}]})
    # The acknowledgement of this publish means that the request is on the broker's disk.
    await nc.jetstream().publish(f"pm.request.demo.{request_id}", body.encode())
    while (record := json.loads((await log.next_msg(timeout=60)).data))["type"] == "tokens":
        print("".join(choice["text"] for choice in record["choices"]), end="", flush=True)
    sys.exit(record["error"]["message"] if record["type"] == "error" else print())


asyncio.run(main(*sys.argv[1:]))
