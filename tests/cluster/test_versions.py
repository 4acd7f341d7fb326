"""A worker of a newer version next to workers of this code, for each role, as in a rolling upgrade.

The newer version is a copy of this code with a higher version and one more sampling parameter,
which older workers do not know.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.client import follow, new_request_id
from shared.protocol import subjects
from shared.protocol.records import Failure, Finish, LogRecord
from shared.protocol.versions import WIRE_VERSION, version_header
from tests import preloaded
from tests.cluster.conftest import CONFIG, ROOT
from tests.gateway.batches.conftest import begin, chat_line, ended, jsonl, results_of
from tests.support.waiting import until

ROLES = ("coordinator", "renderer", "engine")
BATCH_ROLES = ("batcher", "gateway", *ROLES)
NUM_LINES = 20_000
NUM_QUESTIONS = 5
NUM_MORE = 30
"""Lines that get a result after each change."""
NEWER = WIRE_VERSION + 1
NUM_REQUESTS = 24
EDITS = {
    "shared/protocol/versions.py": (f"WIRE_VERSION = {WIRE_VERSION}", f"WIRE_VERSION = {NEWER}"),
    "shared/protocol/sampling.py": (
        "    skip_reading_prefix_cache: bool = False",
        "    skip_reading_prefix_cache: bool = False\n"
        f"    newest: Annotated[int, Meta(extra={{'since': {NEWER}, 'values': ()}})] = 0",
    ),
}


@pytest.fixture(scope="module")
def newer_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("newer")
    for package in ("shared", "workers"):
        shutil.copytree(ROOT / package, tree / package)
    for name, (before, after) in EDITS.items():
        text = (tree / name).read_text()
        assert text.count(before) == 1
        (tree / name).write_text(text.replace(before, after))
    return tree


class Fleet:
    """Workers of this code and of the newer one at a broker."""

    def __init__(self, folder: Path, url: str, newer_code: Path) -> None:
        self.url = url
        self._folder, self._newer_code = folder, newer_code
        self._config = folder / "pagemill.yaml"
        self._config.write_text(CONFIG)
        self._running: dict[tuple[str, bool], Any] = {}

    def start(self, role: str, *, newer: bool) -> None:
        arguments = ["worker", role, "--config", str(self._config), "--nats", self.url]
        env = os.environ | {"PAGEMILL_GATEWAY__PORT": "0"}
        with (self._folder / "workers.log").open("ab") as stderr:
            if newer:
                self._running[role, newer] = subprocess.Popen(
                    [sys.executable, "-m", "workers", *arguments],
                    cwd=self._newer_code,
                    env=env | {"PYTHONPATH": str(self._newer_code)},
                    stderr=stderr,
                )
            else:
                self._running[role, newer] = preloaded.start(arguments, env=env, stderr=stderr)

    async def stop(self, role: str, *, newer: bool) -> None:
        process = self._running.pop((role, newer))
        process.terminate()
        await asyncio.to_thread(process.wait)

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    async def until_ready(self, bus: Bus) -> None:
        async def all_beat() -> bool:
            beating = {(b.role, b.reads == (1, NEWER)) for b in await bus.heartbeats.read()}
            return beating >= self._running.keys()

        await until(all_beat, 240)


@pytest.fixture
async def empty_fleet(
    own_broker: EmbeddedServer, tmp_path: Path, newer_code: Path
) -> AsyncIterator[tuple[Fleet, Bus]]:
    fleet = Fleet(tmp_path, own_broker.url, newer_code)
    bus = await Bus.connect(fleet.url, "test")
    try:
        yield fleet, bus
    finally:
        await bus.close()
        fleet.kill()


@pytest.fixture
async def fleet(empty_fleet: tuple[Fleet, Bus]) -> tuple[Fleet, Bus]:
    fleet, bus = empty_fleet
    for role in ROLES:
        for newer in (False, True):
            fleet.start(role, newer=newer)
    await fleet.until_ready(bus)
    return empty_fleet


async def publish(bus: Bus, version: int = NEWER, **more: Any) -> str:
    """Publish a request with the newer parameter, as a newer gateway does."""
    request_id = new_request_id()
    sampling = {"newest": 1, "max_tokens": 4}
    body = {"model": "demo", "prompt": "What can", "sampling_params": sampling} | more
    subject = subjects.request("demo", request_id)
    await bus.publish_without_id(subject, msgspec.json.encode(body), version_header(version))
    return request_id


async def end_of(bus: Bus, request_id: str) -> LogRecord:
    records = [record async for record in follow(bus, request_id, timeout_s=60)]
    return records[-1]


async def failure_of(bus: Bus, request_id: str) -> Failure:
    end = await end_of(bus, request_id)
    assert isinstance(end, Failure)
    return end


async def test_a_newer_parameter_is_answered_while_a_newer_worker_lives_and_ends_typed_without(
    fleet: tuple[Fleet, Bus],
) -> None:
    workers, bus = fleet
    names = [await publish(bus) for _ in range(NUM_REQUESTS)]
    ends = await asyncio.gather(*(end_of(bus, name) for name in names))
    assert [type(end) for end in ends] == [Finish] * NUM_REQUESTS
    assert await bus.read(subjects.DEAD_STREAM, subjects.DEAD_FILTER) == []

    await workers.stop("engine", newer=True)
    failure = await failure_of(bus, await publish(bus, timeout_s=4))
    assert (failure.error.code, failure.error.retryable) == ("unsupported_version", True)
    assert f"engine: this task has version {NEWER}, and this worker reads versions 1 to" in (
        failure.error.message
    )

    await workers.stop("coordinator", newer=True)
    failure = await failure_of(bus, await publish(bus, timeout_s=4))
    assert (failure.error.code, failure.error.fault) == ("unsupported_version", "server")
    assert "coordinator: this request has version" in failure.error.message

    # Without a version it is a misspelt parameter, which the client learns at once.
    failure = await failure_of(bus, await publish(bus, version=1))
    assert (failure.error.code, failure.error.fault) == ("invalid_request", "client")
    assert "newest" in failure.error.message
    assert await bus.read(subjects.DEAD_STREAM, subjects.DEAD_FILTER) == []
    assert await read_log(bus, names[0])


@pytest.mark.long
async def test_a_batch_continues_while_each_role_changes_its_version(
    empty_fleet: tuple[Fleet, Bus],
) -> None:
    workers, bus = empty_fleet
    for role in BATCH_ROLES:
        workers.start(role, newer=False)
    await workers.until_ready(bus)
    lines = [
        chat_line(n, model="demo", max_tokens=3, temperature=0)
        | {"custom_id": f"{n % NUM_QUESTIONS}-{n}"}
        for n in range(NUM_LINES)
    ]
    for n, line in enumerate(lines):
        line["body"]["messages"] = [{"role": "user", "content": f"question {n % NUM_QUESTIONS}"}]
    async with api(bus) as client:
        batch = await begin(client, jsonl(lines))
    num_done = 0
    for role in BATCH_ROLES:
        num_done = await progress(bus, batch.id, num_done + NUM_MORE)
        workers.start(role, newer=True)
        await workers.until_ready(bus)
        await workers.stop(role, newer=False)
    await progress(bus, batch.id, num_done + NUM_MORE)
    async with api(bus) as client:
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch.id)
        answered = await results_of(client, batch.output_file_id)
        refused = await results_of(client, batch.error_file_id)
    assert batch.status == "cancelled"
    assert answered.keys().isdisjoint(refused)
    assert len(answered) + len(refused) == NUM_LINES
    assert {line["error"]["code"] for line in refused.values()} == {"batch_cancelled"}
    texts = {
        (name[0], line["response"]["body"]["choices"][0]["message"]["content"])
        for name, line in answered.items()
    }
    assert len(texts) == NUM_QUESTIONS


@contextlib.asynccontextmanager
async def api(bus: Bus) -> AsyncIterator[AsyncOpenAI]:
    """Return a client of a gateway that runs; the last heartbeat of a stopped one stays a while."""

    async def url() -> str | None:
        async with httpx.AsyncClient(trust_env=False) as http:
            for beat in await bus.heartbeats.read():
                with contextlib.suppress(httpx.TransportError):
                    if beat.role == "gateway" and beat.url:
                        (await http.get(f"{beat.url}/health")).raise_for_status()
                        return beat.url
        return None

    base_url = f"{await until(url)}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def progress(bus: Bus, batch_id: str, num_lines: int) -> int:
    """Wait until a batch has this number of answers, and return their number."""

    async def completed() -> int:
        async with api(bus) as client:
            counts = (await client.batches.retrieve(batch_id)).request_counts
        assert counts is not None
        return counts.completed if counts.completed >= num_lines else 0

    return int(await until(completed, 240))
