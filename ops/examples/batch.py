"""Run questions as one batch with a stock NATS client: python batch.py TEXT TEXT ..."""

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

# The key of a tenant signs, and is never sent.
KEY = os.environ.get("NATS_NKEY", "data/nats/keys/tenants/local.nk")
CHAT = "/v1/chat/completions"


def line(number: int, question: str) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": question}]}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


async def records(nc: Client, batch_id: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the records of a batch: the stored ones, then live ones."""
    # Subscribed before the stored records are read, so that each later one is live.
    live = await nc.subscribe(f"pm.batches.{batch_id}")
    start = 0
    while True:
        query = json.dumps({"from": start}).encode()
        page = json.loads((await nc.request(f"pm.results.{batch_id}", query, timeout=10)).data)
        # A coordinator may not have read the order yet.
        for record in page.get("records", []):
            yield record
        if page.get("ended"):
            return
        start = page.get("next", 0)
        if not page.get("records"):
            with contextlib.suppress(TimeoutError):
                await live.next_msg(timeout=1)


async def main(questions: list[str]) -> None:
    url = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
    nc, batch_id = await nats.connect(url, nkeys_seed=KEY), uuid.uuid4().hex
    order = {"endpoint": CHAT, "lines": [line(n, text) for n, text in enumerate(questions)]}
    # The acknowledgement of this publish means that every line will have a result.
    await nc.jetstream().publish(f"pm.batch.{batch_id}", json.dumps(order).encode())
    async for record in records(nc, batch_id):
        for result in [*record.get("output", []), *record.get("errors", [])]:
            if record["type"] == "results":
                print(json.dumps(result))
        if record["type"] == "ended":
            print(record["status"], *(e["message"] for e in record["errors"]), file=sys.stderr)
    await nc.close()


asyncio.run(main(sys.argv[1:]))
