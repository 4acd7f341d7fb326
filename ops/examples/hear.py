"""Ask about a recording with a stock NATS client: python hear.py "What do you hear?" a.wav"""

import asyncio
import base64
import json
import os
import pathlib
import sys
import uuid

import nats

MODEL = os.environ.get("MODEL", "hearing")
# The key of a tenant signs, and is never sent. An empty name is for a broker without keys.
KEY = os.environ.get("NATS_NKEY", "data/nats/keys/tenants/local.nk")


async def main(question: str, recording: bytes) -> None:
    url = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
    nc = await nats.connect(url, nkeys_seed=KEY or None)
    request_id = uuid.uuid4().hex
    # Subscribed before the request is published, so that no record is missed.
    log = await nc.subscribe(f"pm.tokens.{request_id}")
    # WAV, FLAC, OGG or MP3: the file itself says which.
    url = "data:;base64," + base64.b64encode(recording).decode()
    sound = {"type": "audio_url", "audio_url": {"url": url}}
    content = [sound, {"type": "text", "text": question}]
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]})
    await nc.jetstream().publish(f"pm.request.{MODEL}.{request_id}", body.encode())
    while (record := json.loads((await log.next_msg(timeout=60)).data))["type"] == "tokens":
        print("".join(choice["text"] for choice in record["choices"]), end="", flush=True)
    sys.exit(record["error"]["message"] if record["type"] == "error" else print())


asyncio.run(main(sys.argv[1], pathlib.Path(sys.argv[2]).read_bytes()))
