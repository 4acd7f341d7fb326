"""Ask Pagemill with nothing but a NATS client: python ask.py "What can you do?" [picture.png]"""

import asyncio
import base64
import json
import os
import pathlib
import sys
import uuid

import nats


async def main(question: str, *pictures: str) -> None:
    nc = await nats.connect(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"))
    name = uuid.uuid4().hex
    log = await nc.subscribe(f"pm.tokens.{name}")
    content = [{"type": "text", "text": question}]
    for data in map(pathlib.Path.read_bytes, map(pathlib.Path, pictures)):
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": content}]})
    js, headers = nc.jetstream(), {"Nats-Msg-Id": name}
    await js.publish("pm.request.demo", body.encode(), headers=headers)
    while (record := json.loads((await log.next_msg(timeout=60)).data))["type"] == "tokens":
        print("".join(choice["text"] for choice in record["choices"]), end="", flush=True)
    sys.exit(record["error"]["message"] if record["type"] == "error" else print())


asyncio.run(main(*sys.argv[1:]))
