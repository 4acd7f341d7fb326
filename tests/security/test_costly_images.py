"""Another tenant's requests during an endless attack with the costliest accepted images."""

import asyncio
import base64
import itertools
import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
import yaml
from nats.aio.client import Client

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.client import new_request_id
from shared.protocol.records import Failure, Finish, TokenChunk
from shared.state.log_records import decode_record
from tests.cluster.conftest import Cluster, start_cluster, stop_cluster
from tests.security import image_files as files
from workers.gateway.http.auth import digest, make_key
from workers.keyring import Keyring
from workers.settings import DEMO_MODEL

MIB = 2**20
ATTACKER, OTHER = "attacker", "other"
KEYS = {name: make_key() for name in (ATTACKER, OTHER)}
RED = (IMAGES / "red.png").read_bytes()
NUM_IMAGES = 5
PERIOD_S = 1.0
SENDERS_OF_EACH_WAY = 2
# Scans cost most of what is left, 0.7 s. A file of profiles cost a minute.
MAX_CPU_S = 3.0


def costly_files(size: int) -> dict[str, bytes]:
    """Return files with `size` costly bytes. Some of the files are refused."""
    num_chunks = size // len(files.chunk(b"abCd"))
    profile = files.chunk(b"iCCP", b"a\0\0" + files.unpacks_to(MIB))
    return {
        "PNG, profiles": files.png(profile * (size // len(profile))),
        "JPEG, fill bytes": files.jpeg_with(b"\xff" * size),
        "JPEG, fill bytes in its scan": files.in_scan(b"\xff" * size),
        "JPEG, 98 scans": files.jpeg_of_scans(98, (3200, 3200)),
        "JPEG, 98 scans of too many pixels": files.jpeg_of_scans(98, (4096, 4096)),
        "PNG, chunks": files.png(files.chunk(b"abCd") * num_chunks),
        "PNG, as many as are accepted": files.png(files.chunk(b"abCd") * min(num_chunks, 65_000)),
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    Keyring(tmp_path / "data" / "nats" / "keys").complete(KEYS)
    entries = [{"name": name, "sha256": digest(key)} for name, key in KEYS.items()]
    tree = {
        "models": {"demo": {"path": str(DEMO_MODEL), "max_model_len": 1024}},
        "gateway": {"api_keys": entries},
    }
    running = start_cluster(tmp_path, yaml.safe_dump(tree))
    yield running
    assert stop_cluster(running) == 0


def question(kind: str, data: bytes) -> dict[str, Any]:
    # Bytes after the end make it a new file, which no cache has.
    encoded = base64.b64encode(data + secrets.token_bytes(8)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{encoded}"}}
    text = {"type": "text", "text": "What color is this image?"}
    messages = [{"role": "user", "content": [image, text]}]
    sampling = {"temperature": 0, "max_tokens": 16}
    return {"model": "demo", "messages": messages, "sampling_params": sampling}


class Site:
    """The two ways into a cluster, for clients of both tenants."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        errors = cluster.log.with_suffix(".err").read_text()
        match = re.search(r"ready at .*?(http://[0-9.]+:\d+)", errors, re.DOTALL)
        assert match is not None
        self._url = match[1]
        self._clients: dict[str, Client] = {}

    async def connect(self) -> None:
        for tenant in KEYS:
            key = self._cluster.keys / "tenants" / f"{tenant}.nk"
            self._clients[tenant] = await nats.connect(
                self._cluster.url, nkeys_seed=str(key), connect_timeout=60
            )

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def ask_over_http(self, tenant: str, body: dict[str, Any]) -> str:
        """Return the text of the answer, or the code of an error."""
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        sampling = body["sampling_params"]
        body = {name: value for name, value in body.items() if name != "sampling_params"}
        async with httpx.AsyncClient(base_url=self._url, timeout=None, trust_env=False) as http:
            got = await http.post("/v1/chat/completions", json=body | sampling, headers=headers)
        if got.status_code != 200:
            return str(got.json()["error"]["code"])
        return str(got.json()["choices"][0]["message"]["content"])

    async def ask_over_nats(self, tenant: str, body: dict[str, Any]) -> str:
        """Return the text of the answer, or the code of an error."""
        nc, request_id = self._clients[tenant], new_request_id()
        log = await nc.subscribe(f"pm.tokens.{request_id}")
        await nc.request(f"pm.request.demo.{request_id}", json.dumps(body).encode(), timeout=300)
        text = ""
        try:
            while True:
                record = decode_record((await log.next_msg(None)).data)
                if isinstance(record, TokenChunk):
                    text += "".join(choice.text for choice in record.choices)
                elif isinstance(record, Failure):
                    return record.error.code
                elif isinstance(record, Finish):
                    return text
        finally:
            await log.unsubscribe()


Ask = Callable[[str, dict[str, Any]], Awaitable[str]]


Files = Iterator[tuple[str, bytes]]


async def attack(ask: Ask, costly: Files, stop: asyncio.Event) -> Counter[str]:
    """Send one file after the other; return how they ended."""
    ended: Counter[str] = Counter()
    while not stop.is_set():
        name, data = next(costly)
        kind = name.partition(",")[0].lower()
        ended[f"{name}: {await ask(ATTACKER, question(kind, data))}"] += 1
    return ended


async def answers_beside_an_attack(site: Site, num_images: int) -> tuple[list[float], int]:
    """Return how long each answer to the other tenant took, and how many the attacker got."""
    stop, ways = asyncio.Event(), [site.ask_over_http, site.ask_over_nats]
    # A message has room for less than a body.
    costly = [itertools.cycle(costly_files(size).items()) for size in (24 * MIB, 2 * MIB)]
    senders = [
        asyncio.create_task(attack(way, cycle, stop))
        for way, cycle in [*zip(ways, costly, strict=True)] * SENDERS_OF_EACH_WAY
    ]

    async def ask(number: int) -> float:
        began = time.monotonic()
        text = await ways[number % 2](OTHER, question("png", RED))
        assert "red" in text.lower()
        return time.monotonic() - began

    answers = []
    for number in range(num_images):
        await asyncio.sleep(PERIOD_S)
        answers.append(asyncio.create_task(ask(number)))
    took = await asyncio.gather(*answers)
    stop.set()
    ended = sum(await asyncio.gather(*senders), Counter[str]())
    for name, count in sorted(ended.items()):
        print(f"{count} x {name}")  # noqa: T201
    return took, ended.total()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, which other load does not prolong much."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
async def test_another_tenant_is_answered_during_costly_images(cluster: Cluster) -> None:
    site, bus = Site(cluster), await Bus.connect(cluster.url, "test")
    await site.connect()
    renderer = await cluster.pid(bus, "renderer")
    before_s = cpu_s(renderer)
    async with asyncio.timeout(280):
        took, num_attacks = await answers_beside_an_attack(site, NUM_IMAGES)
    each_s = (cpu_s(renderer) - before_s) / (num_attacks + len(took))
    await site.close()
    await bus.close()
    times = ", ".join(f"{seconds:.1f}" for seconds in sorted(took))
    print(f"answers after {times} s, {each_s:.2f} s of processor time a request")  # noqa: T201
    assert len(took) == NUM_IMAGES
    assert each_s < MAX_CPU_S
