"""A disk with little free space: new work is refused with the numbers, and continues with room."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from nats.aio.client import Client

from shared.bus.bus import Bus
from tests.cluster.conftest import CONFIG, Cluster, sign_in, start_cluster, stop_cluster, stopped
from tests.support.small_disk import fill_until, mounted_disk
from tests.support.waiting import until

MIB = 2**20
LIMIT_MIB = 32
LIMITS = f"nats: {{min_free_mib: {LIMIT_MIB}}}\n"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "data" / "nats", 96) as folder:
        yield folder


@pytest.fixture
def cluster(disk: Path, tmp_path: Path) -> Iterator[Cluster]:
    running = start_cluster(tmp_path, CONFIG + LIMITS)
    yield running
    assert stop_cluster(running) == 0


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=60, trust_env=False) as client:
        yield client


async def wait_for_status(http: httpx.AsyncClient, status: str) -> httpx.Response:
    async def ready() -> httpx.Response | None:
        answer = await http.get("/ready")
        return answer if answer.json()["status"] == status else None

    answer: httpx.Response = await until(ready)
    return answer


async def ask(nc: Client, body: dict[str, Any]) -> dict[str, Any]:
    """Publish a request as a tenant's client, and return the last record of its log."""
    request_id = f"r-{secrets.token_hex(6)}"
    log = await nc.subscribe(f"pm.tokens.{request_id}")
    await nc.jetstream().publish(f"pm.request.demo.{request_id}", json.dumps(body).encode())
    record: dict[str, Any] = {"type": "tokens"}
    while record["type"] == "tokens":
        record = json.loads((await log.next_msg(timeout=60)).data)
    return record


async def ask_until(nc: Client, body: dict[str, Any], end: str) -> dict[str, Any]:
    """Ask until a log ends with a record of this type. Workers read the full stores each second."""

    async def read_end() -> dict[str, Any] | None:
        record = await ask(nc, body)
        return record if record["type"] == end else None

    record: dict[str, Any] = await until(read_end)
    return record


async def test_new_work_is_refused_while_the_disk_is_nearly_full(
    disk: Path, cluster: Cluster, http: httpx.AsyncClient
) -> None:
    body = {key: value for key, value in CHAT.items() if key != "max_tokens"}
    nc = await sign_in(cluster, cluster.client_key)
    assert (await ask(nc, body))["type"] == "finish"
    bus = await Bus.connect(cluster.url, "test")
    with stopped(await cluster.pid(bus, "engine")):
        in_flight = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: cluster.log.read_text().count('"accepted"') == 2)
        ballast = await asyncio.to_thread(fill_until, disk, LIMIT_MIB // 2 * MIB)
        ready = await wait_for_status(http, "disk full")
    # It continues while nothing else is accepted.
    assert (await in_flight).status_code == 200
    assert ready.status_code == 503

    refused = [
        await http.post("/v1/chat/completions", json=CHAT),
        await http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"}),
        await http.post("/v1/responses", json={"model": "demo", "input": "hi"}),
        await http.post("/v1/files", files={"file": ("a.png", b"content")}),
    ]
    for answer in refused:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (507, "disk_full"), answer.text
        assert int(answer.headers["retry-after"]) > 0
        for part in (f"{LIMIT_MIB}.0 MiB", "nats.min_free_mib"):
            assert part in error["message"]
        assert "data/nats" not in error["message"]
    assert f"{LIMIT_MIB}.0 MiB" in ready.json()["reason"]
    record = await ask_until(nc, body, "error")
    assert (record["error"]["code"], record["error"]["retryable"]) == ("disk_full", True)
    assert f"{LIMIT_MIB}.0 MiB" in record["error"]["message"]

    ballast.unlink()
    await wait_for_status(http, "ok")
    await ask_until(nc, body, "finish")
    again = await http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
    assert again.status_code == 200
    log = cluster.log.read_text() + cluster.log.with_suffix(".err").read_text()
    assert "broker_restarted" not in log
    await nc.close()
    await bus.close()
