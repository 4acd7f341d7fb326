"""Queue a job for Pagemill with a stock NATS client, leave, and fetch the answer later.

python job.py ask "What can you do?"          queues a question, and prints the id of the job
python job.py paint "a red circle on blue"    queues an image, and prints the id of the job
python job.py read ID                         prints the answer to a question
python job.py save ID FILE                    writes an image to a file
"""

import asyncio
import base64
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.errors import Error

# The key of a tenant signs, and is never sent. An empty name is for a broker without keys.
KEY = os.environ.get("NATS_NKEY", "data/nats/keys/tenants/local.nk")


async def queue(nc: Client, request: dict[str, Any]) -> str:
    job = uuid.uuid4().hex
    # The acknowledgement of this publish means that the job is on the broker's disk.
    await nc.jetstream().publish(f"pm.request.demo.{job}", json.dumps(request).encode())
    return job


async def call(nc: Client, subject: str, query: dict[str, Any]) -> Any:
    reply = await nc.request(subject, json.dumps(query).encode(), timeout=10)
    page = json.loads(reply.data)
    if "error" in page:
        sys.exit(page["error"]["message"])
    return page


async def records(nc: Client, job: str, output: str = "text") -> AsyncIterator[dict[str, Any]]:
    """Yield all records of an output, page by page, and wait for those that are not there yet."""
    start, ended = 0, False
    while not ended:
        page = await call(nc, f"pm.read.{job}", {"from": start, "output": output})
        for record in page["records"]:
            if record["type"] == "error":
                sys.exit(record["error"]["message"])
            yield record
        start, ended = page["next"], page["ended"]
        if not page["records"]:
            await asyncio.sleep(0.5)


async def read(nc: Client, job: str) -> None:
    async for record in records(nc, job):
        for choice in record.get("choices", []):
            print(choice["text"], end="", flush=True)
    print()


async def save(nc: Client, job: str, file: str) -> None:
    async for _ in records(nc, job):
        pass  # The last of these records is the end of the job, or its error.
    async for record in records(nc, job, "image"):
        if record["type"] != "image":
            continue  # A record of the progress.
        name, data, ended = record["media"].removeprefix("media:"), b"", False
        while not ended:
            page = await call(nc, f"pm.file.{name}", {"from": len(data)})
            data += base64.b64decode(page["data"])
            ended = page["ended"]
        Path(file).write_bytes(data)


async def report(error: Exception) -> None:
    """Print what the server refuses, such as a subject that the key may not use."""
    print(error, file=sys.stderr)


async def main(*arguments: str) -> None:
    if len(arguments) < 2:
        sys.exit(__doc__)
    url = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
    try:
        nc = await nats.connect(
            url, nkeys_seed=KEY or None, max_reconnect_attempts=1, error_cb=report
        )
    except (OSError, Error):
        sys.exit(f"cannot connect to {url} with the key {KEY}: run pagemill up")
    match arguments:
        case "ask", question:
            messages = [{"role": "user", "content": question}]
            print(await queue(nc, {"model": "demo", "messages": messages}))
        case "paint", prompt:
            print(await queue(nc, {"model": "demo", "prompt": prompt, "outputs": ["image"]}))
        case "read", job:
            await read(nc, job)
        case "save", job, file:
            await save(nc, job, file)
        case _:
            sys.exit(__doc__)
    await nc.close()


asyncio.run(main(*sys.argv[1:]))
