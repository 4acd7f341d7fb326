"""A lost cluster continues elsewhere from its backup, with real processes."""

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.bus.embedded_server import free_port
from shared.client import ask, follow, new_request_id
from shared.protocol import subjects
from shared.protocol.records import Failure, Finish, LogRecord
from tests import preloaded
from tests.cluster.conftest import (
    CONFIG,
    ROOT,
    Cluster,
    answer,
    request_text,
    run,
    start_cluster,
    stop_cluster,
    stopped,
)
from tests.cluster.streams import assert_gapless, tokens_of
from tests.support.waiting import until

# One request is computed at a time, so the others wait.
ONE_AT_A_TIME = CONFIG + "engine: {max_num_seqs: 1}\n"
LONG = request_text("What can you do?", temperature=0.0, ignore_eos=True, max_tokens=300)


@dataclass
class LostRequests:
    """Requests to the cluster that is lost."""

    done: str = field(default_factory=new_request_id)
    broken: str = field(default_factory=new_request_id)
    in_flight: str = field(default_factory=new_request_id)
    waiting: list[str] = field(default_factory=lambda: [new_request_id() for _ in range(3)])
    response_id: str = ""
    answer: list[LogRecord] = field(default_factory=list)
    """The answer of `done`."""
    num_written: int = 0
    """Records of `in_flight` at the time of the backup."""


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Cluster, Bus]]:
    cluster = start_cluster(folder, ONE_AT_A_TIME)
    bus = await Bus.connect(cluster.url, "test")
    try:
        yield cluster, bus
    finally:
        await bus.close()
        stop_cluster(cluster)


def gateway_url(cluster: Cluster) -> str:
    match = re.search(r"http://[0-9.:]+", (cluster.log.parent / "up.err").read_text())
    assert match is not None
    return match[0]


async def respond(cluster: Cluster) -> str:
    """Have a response made, and return its id."""
    async with httpx.AsyncClient(base_url=gateway_url(cluster), timeout=60) as http:
        response = await http.post("/v1/responses", json={"model": "demo", "input": "Hello"})
        assert response.json()["status"] == "completed", response.text
        return str(response.json()["id"])


async def read_first(bus: Bus, request_id: str) -> None:
    """Publish a long request, and return when it has its first tokens."""
    async for _ in ask(bus, LONG, request_id):
        return


async def lose_a_cluster(folder: Path, backup: Path) -> LostRequests:
    """Back a cluster up while requests are done, broken, written and waiting; then stop it."""
    requests = LostRequests()
    async with running(folder) as (cluster, bus):
        hello = request_text("Hello")
        requests.answer = [record async for record in ask(bus, hello, requests.done)]
        task = subjects.stage("renderer", "demo", "interactive", requests.broken)
        await bus.publish(task, b"\xc1garbage", requests.broken)
        assert [type(record) async for record in follow(bus, requests.broken)] == [Failure]
        requests.response_id = await respond(cluster)
        await read_first(bus, requests.in_flight)
        with stopped(await cluster.pid(bus, "engine")):
            requests.num_written = len(await read_log(bus, requests.in_flight))
            waiting = [asyncio.create_task(read_first(bus, name)) for name in requests.waiting]

            async def all_queued() -> bool:
                return (await bus.figures.size(subjects.REQUESTS_STREAM))[0] == 4

            await until(all_queued, 60, "the requests are not queued")
            printed = await asyncio.to_thread(run, cluster, "backup", str(backup))
        assert re.search(r"REQUESTS +4 messages", printed), printed
        await asyncio.gather(*waiting)
    return requests


def restore(backup: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Restore into the embedded broker of a folder, which does not run."""
    env = os.environ | {"PAGEMILL_NATS__PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    return preloaded.run("restore", str(backup), *arguments, env=env, cwd=folder)


async def test_requests_end_once_in_another_cluster(tmp_path: Path) -> None:
    first, second, backup = tmp_path / "first", tmp_path / "second", tmp_path / "backup.zip"
    for folder in (first, second):
        folder.mkdir()
        (folder / "pagemill.yaml").write_text(ONE_AT_A_TIME)
    requests = await lose_a_cluster(first, backup)
    restored = restore(backup, second)
    assert restored.returncode == 0, restored.stderr
    assert re.search(r"REQUESTS +4 messages", restored.stdout)

    async with running(second) as (cluster, bus):
        expected = tokens_of(await answer(bus, LONG))
        for request_id in (requests.in_flight, *requests.waiting):
            records = [record async for record in follow(bus, request_id)]
            assert_gapless(records)
            assert isinstance(records[-1], Finish)
            assert tokens_of(records) == expected
            assert await read_log(bus, request_id) == records
        # The records before the backup stay, and the rest follows them.
        assert 0 < requests.num_written < len(await read_log(bus, requests.in_flight))
        assert [record async for record in follow(bus, requests.done)] == requests.answer
        assert "undecodable_message" in run(cluster, "dead", "show", requests.broken)
        async with httpx.AsyncClient(base_url=gateway_url(cluster), timeout=60) as http:
            response = await http.get(f"/v1/responses/{requests.response_id}")
        assert response.json()["status"] == "completed"

        async def none_queued() -> bool:
            return (await bus.figures.size(subjects.REQUESTS_STREAM))[0] == 0

        await until(none_queued, 60, "a request that has ended is still queued")
        refused = restore(backup, second, "--replace", "--nats", cluster.url)
        assert refused.returncode == 1
        assert "stop all of them first" in refused.stderr
