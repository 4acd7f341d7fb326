"""A gateway and batchers in front of a scripted model."""

import asyncio
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from ops.chaos.agents.scripted_model import MODEL, ScriptedModel
from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol import subjects
from shared.protocol.batch_log import BatchRecord, decode_batch_record
from shared.protocol.requests import GenerateRequest
from tests import preloaded
from tests.cluster.conftest import PAGEMILL, ROOT
from tests.gateway.conftest import Gateway, Process, start_gateway_at
from tests.support.waiting import until

HELD_S = 0.05
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


class HeldModel(ScriptedModel):
    """A model that can be held: it then answers nothing but the next `num_free` requests."""

    def __init__(self, url: str) -> None:
        super().__init__(url, echo)
        self.num_free = 0
        self.num_held = 0
        self._is_open = threading.Event()
        self._is_open.set()

    async def _answer(self, bus: Bus, delivery: Delivery) -> None:
        self.num_held += 1
        while not (self._is_open.is_set() or self.num_free > 0):
            await delivery.progress()
            await asyncio.sleep(HELD_S)
        self.num_held -= 1
        self.num_free -= 1
        await super()._answer(bus, delivery)

    @contextlib.contextmanager
    def held_after(self, num_free: int) -> Iterator[None]:
        self.num_free = num_free
        self._is_open.clear()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._is_open.set()


def echo(request: GenerateRequest, _: str) -> str:
    return f"echo {request.messages[-1].content}" if request.messages else "echo"


@dataclass
class BatchRig:
    broker: EmbeddedServer
    gateway: Gateway
    tree: dict[str, Any]
    folder: Path
    model: HeldModel
    batchers: list[Process] = field(default_factory=list)

    def start_batcher(self, *, forked: bool = True) -> Process:
        """Start a batcher. Without a fork, it has imported only its own modules."""
        config = self.folder / "batcher.yaml"
        config.write_text(json.dumps(self.tree))
        command = ["worker", "batcher", "--config", str(config), "--nats", self.broker.url]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with (self.folder / "batcher.log").open("ab") as stderr:
            batcher: Process = (
                preloaded.start(command, cwd=self.folder, env=env, stderr=stderr)
                if forked
                else subprocess.Popen(
                    [*PAGEMILL, *command], cwd=self.folder, env=env, stderr=stderr
                )
            )
        self.batchers.append(batcher)
        return batcher

    def kill_batcher(self) -> None:
        batcher = self.batchers.pop()
        batcher.kill()
        batcher.wait(10)


def chat_line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"line {number}"}]} | fields
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def lines_of(path: str, bodies: Sequence[dict[str, Any]]) -> bytes:
    """Return the input file of a batch with these bodies."""
    return jsonl(
        [
            {"custom_id": f"line-{number}", "method": "POST", "url": path, "body": body}
            for number, body in enumerate(bodies)
        ]
    )


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def begin(client: AsyncOpenAI, content: bytes, window: str = "24h", **fields: Any) -> Batch:
    file = await client.files.create(file=("a.jsonl", content), purpose="batch")
    order: dict[str, Any] = {"completion_window": window, "endpoint": CHAT} | fields
    return await client.batches.create(input_file_id=file.id, **order)


async def ended(client: AsyncOpenAI, batch_id: str, within_s: float = 120.0) -> Batch:
    async def has_ended() -> bool:
        return (await client.batches.retrieve(batch_id)).status in ENDED

    await until(has_ended, within_s)
    return await client.batches.retrieve(batch_id)


async def results_of(client: AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a file by their custom ids, each of which it has once."""
    if file_id is None:
        return {}
    content = await client.files.content(file_id)
    lines = [json.loads(line) for line in content.text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


async def records_of(bus: Bus, batch_id: str) -> list[BatchRecord]:
    subject = subjects.stored_batch(subjects.batch_log("", batch_id))
    stored = await bus.read(subjects.BATCHES_STREAM, subject)
    records = [decode_batch_record(message.data) for message in stored]
    assert None not in records
    return [record for record in records if record is not None]


@contextlib.contextmanager
def running_rig(folder: Path, **sections: Any) -> Iterator[BatchRig]:
    """Run a separate broker, because the scripted model takes every request of its broker."""
    broker = EmbeddedServer(folder / "nats")
    broker.start()
    tree = {
        "models": {MODEL: {"path": str(ROOT / "ops" / "demo_model")}},
        "nats": {"unchecked": True},
        "delivery": {"ack_wait_s": 1.5, "drain_s": 2.0},
        "gateway": {"port": 0},
    }
    gateway = start_gateway_at(broker.url, tree | sections, folder)
    running = BatchRig(broker, gateway, tree | sections, folder, HeldModel(broker.url))
    running.model.start()
    yield running
    running.model.stop()
    for process in running.batchers:
        process.kill()
        process.wait(10)
    gateway.stop()
    broker.stop()


@pytest.fixture(scope="module")
def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BatchRig]:
    """The rig of a module, with the module's `SECTIONS` of the configuration."""
    sections = getattr(request.module, "SECTIONS", {})
    with running_rig(tmp_path_factory.mktemp("batches"), **sections) as running:
        yield running


@pytest.fixture
def batcher(rig: BatchRig) -> Process:
    """A batcher, which the tests share unless they kill it."""
    return rig.batchers[-1] if rig.batchers else rig.start_batcher()


@pytest.fixture
async def client(rig: BatchRig) -> AsyncIterator[AsyncOpenAI]:
    url = f"{rig.gateway.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
async def batch_bus(rig: BatchRig) -> AsyncIterator[Bus]:
    connection = await Bus.connect(rig.broker.url, "test")
    yield connection
    await connection.close()
