"""Ask Pagemill with a stock NATS client, disconnect, and read the answer: python again.py TEXT."""

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import nats
from nats.aio.client import Client

# The key of a tenant signs, and is never sent. An empty name is for a broker without keys.
KEY = os.environ.get("NATS_NKEY", "data/nats/keys/tenants/local.nk")


async def connect() -> Client:
    url = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
    return await nats.connect(url, nkeys_seed=KEY or None)


async def publish(question: str) -> str:
    nc, request_id = await connect(), uuid.uuid4().hex
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": question}]})
    # The acknowledgement of this publish means that the request is on the broker's disk.
    await nc.jetstream().publish(f"pm.request.demo.{request_id}", body.encode())
    await nc.close()
    return request_id


async def read(nc: Client, request_id: str, start: int = 0) -> AsyncIterator[dict[str, Any]]:
    """Yield the records of an answer from number `start` on: the stored ones, then live ones."""
    # Subscribed before the stored records are read, so that each later one is live.
    live = await nc.subscribe(f"pm.tokens.{request_id}")
    while True:
        query = json.dumps({"from": start}).encode()
        page = json.loads((await nc.request(f"pm.read.{request_id}", query, timeout=10)).data)
        if "error" in page:
            sys.exit(page["error"]["message"])
        for record in page["records"]:
            yield record
        start = page["next"]
        if page["ended"]:
            return
        # Without a live record for some seconds, the stored ones are read again.
        with contextlib.suppress(TimeoutError):
            while not page["records"]:
                record = json.loads((await live.next_msg(timeout=5)).data)
                if record["index"] > start:
                    break  # Records have been missed.
                if record["index"] == start:
                    yield record
                    start += 1
                    if record["type"] != "tokens":
                        return


async def main(question: str) -> None:
    request_id = await publish(question)
    print(f"{request_id}: published, and disconnected", file=sys.stderr)
    async for record in read(await connect(), request_id):
        if record["type"] == "error":
            sys.exit(record["error"]["message"])
        for choice in record.get("choices", []):
            print(choice["text"], end="", flush=True)
    print()


asyncio.run(main(*sys.argv[1:]))
