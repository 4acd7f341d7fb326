"""Queues of pools that have never run: an autoscaler reads their lengths."""

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer, free_port
from shared.codec.envelope import TensorData
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.names import scoped_id, split_id
from shared.protocol.requests import GenerateRequest, encode_request
from shared.protocol.subjects import RequestPlace
from shared.protocol.task_messages import EngineBody, RenderBody, Task
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Forward, WorkerLoop
from tests.support.waiting import until
from workers.coordinator import worker as coordinator

CONFIG = Config({"demo": ModelConfig("nowhere", tower="encoder"), "org/b": ModelConfig("nowhere")})
WITH_SLOTS = Config({"demo": ModelConfig("nowhere", slots=64)})
ACCOUNT = "PAGEMILL"


@pytest.fixture
async def monitored(tmp_path: Path) -> AsyncIterator[tuple[Bus, int]]:
    """A connection to a broker of the test's own, and the port of the broker's monitoring."""
    port = free_port()
    settings = EmbeddedServer(tmp_path).config_file.read_text()
    (tmp_path / "nats.conf").write_text(f"{settings}\nhttp: 127.0.0.1:{port}\n")
    server = EmbeddedServer(tmp_path / "store", config_file=tmp_path / "nats.conf")
    await asyncio.to_thread(server.start)
    bus = await Bus.connect(server.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    yield bus, port
    await bus.close()
    await asyncio.to_thread(server.stop)


def read_lags(port: int) -> dict[str, int]:
    """Return the lag of each consumer of STAGES as KEDA's scaler computes it."""
    address = f"http://127.0.0.1:{port}/jsz?acc={ACCOUNT}&consumers=true&config=true"
    with urllib.request.urlopen(address, timeout=10) as answer:
        (account,) = json.load(answer)["account_details"]
    (stages,) = [s for s in account["stream_detail"] if s["name"] == subjects.STAGES_STREAM]
    return {
        consumer["name"]: consumer["num_pending"] + consumer["num_ack_pending"]
        for consumer in stages.get("consumer_detail", [])
    }


def context_of(bus: Bus, role: str, config: Config = CONFIG) -> Context:
    return Context(role, f"{role}-1", None, config, bus, structlog.get_logger())


async def render(_: Task[Any], __: list[TensorData], ___: Job) -> Forward:
    return Forward(EngineBody([1, 2, 3], []))


@contextlib.asynccontextmanager
async def running(bus: Bus, config: Config = CONFIG) -> AsyncIterator[None]:
    """Run a coordinator and a renderer, and drain them at the end."""
    contexts = [context_of(bus, role, config) for role in ("coordinator", "renderer")]
    renderers = WorkerLoop(contexts[1])
    await renderers.add_stage(["demo"], 8, RenderBody, render)
    workers = [coordinator.main(contexts[0]), renderers.run()]
    tasks = [asyncio.create_task(worker) for worker in workers]
    yield
    for context in contexts:
        context.shutdown.signal()
    await asyncio.gather(*tasks)


async def test_a_pool_that_has_never_run_has_the_lag_of_its_requests(
    monitored: tuple[Bus, int],
) -> None:
    bus, port = monitored
    async with running(bus):
        data = encode_request(GenerateRequest("demo", prompt="a"), {})
        for number in range(20):
            await bus.publish_without_id(subjects.request("demo", f"r-{number}"), data)
        # Every stage of every model has a consumer for each lane.
        stages = {"demo": ["renderer", "encoder", "engine"], "org/b": ["renderer", "engine"]}
        expected = {
            subjects.stage_consumer(stage, model, lane): 20 * (lane == "interactive")
            if (model, stage) == ("demo", "engine")
            else 0
            for model, names in stages.items()
            for stage in names
            for lane in subjects.LANES
        }
        deadline = time.monotonic() + 30
        # Renderers acknowledge a task after they have forwarded it.
        while (lags := await asyncio.to_thread(read_lags, port)) != expected:
            assert time.monotonic() < deadline, lags


async def test_requests_of_a_tenant_with_the_same_key_have_the_same_slot(
    monitored: tuple[Bus, int],
) -> None:
    bus, _ = monitored
    async with running(bus, WITH_SLOTS):
        keys = {"a1": "a", "a2": "a", "a-other": "a", "b": "b", "none": None}
        for name, key in keys.items():
            data = encode_request(GenerateRequest("demo", prompt=name, prompt_cache_key=key), {})
            tenant = "two" if name == "a-other" else "one"
            await bus.publish_without_id(subjects.request("demo", scoped_id(name, tenant)), data)
        slots: dict[str, int | None] = {}
        async with asyncio.timeout(30):
            while slots.keys() != keys.keys():
                for subject in await bus.figures.subjects_of(
                    subjects.STAGES_STREAM, subjects.STAGES_FILTER
                ):
                    if subjects.parts_of_stage(subject)[0] == "engine":
                        name, _ = split_id(subjects.last_token(subject))
                        slots[name] = subjects.slot_of_stage(subject)
                await asyncio.sleep(0.02)
    assert slots["a1"] == slots["a2"] is not None
    assert len({slots["a1"], slots["a-other"], slots["b"]}) == 3
    assert slots["none"] is None


async def admit_first(bus: Bus, subject: str, data: bytes) -> RequestPlace:
    """Publish the request `r`, and return its place when it has its first task."""
    await bus.publish_without_id(subject, data)
    tasks = subjects.stages_of("r")
    await until(lambda: bus.has_messages(subjects.STAGES_STREAM, tasks))
    _, last = await bus.figures.sequence_range(subjects.REQUESTS_STREAM)
    return RequestPlace(subjects.REQUESTS_STREAM, last)


async def test_a_request_that_is_published_again_takes_one_place(
    monitored: tuple[Bus, int],
) -> None:
    bus, _ = monitored
    serving = asyncio.create_task(coordinator.main(context_of(bus, "coordinator")))
    subject = subjects.request("demo", "r")
    data = encode_request(GenerateRequest("demo", prompt="a"))
    first = await admit_first(bus, subject, data)
    for _ in range(3):
        await bus.publish_without_id(subject, data)

    async def only_first_is_left() -> bool:
        queued = [request async for request in request_queue.queued_requests(bus)]
        return len(queued) == 1 and await request_queue.queued_request(bus, first) is not None

    await until(only_first_is_left)
    assert len(await bus.read(subjects.STAGES_STREAM, subjects.stages_of("r"))) == 1
    serving.cancel()


async def test_a_task_without_its_request_stops_no_later_request(
    monitored: tuple[Bus, int],
) -> None:
    bus, _ = monitored
    serving = asyncio.create_task(coordinator.main(context_of(bus, "coordinator")))
    subject = subjects.request("demo", "r")
    data = encode_request(GenerateRequest("demo", prompt="a"))
    first = await admit_first(bus, subject, data)
    await bus.delete(*first)
    await bus.publish_without_id(subject, data)
    queue = subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER

    async def is_delayed() -> bool:
        """Whether a coordinator has the request until its deadline."""
        depth = await bus.figures.depth(*queue)
        return depth.last_delivered == first.sequence + 1 and depth.num_in_flight == 1

    await until(is_delayed)
    await bus.publish_without_id(subjects.request("demo", "last"), data)
    await until(lambda: bus.has_messages(subjects.STAGES_STREAM, subjects.stages_of("last")))
    second = RequestPlace(first.stream, first.sequence + 1)
    assert await request_queue.queued_request(bus, second) is not None
    serving.cancel()


@pytest.mark.parametrize("stream", [subjects.REQUESTS_STREAM, subjects.STAGES_STREAM])
async def test_streams_that_are_deleted_under_workers_come_back(
    monitored: tuple[Bus, int], stream: str
) -> None:
    """A request that has lost its tasks is queued for its stages again."""
    bus, _ = monitored
    async with running(bus):
        data = encode_request(GenerateRequest("demo", prompt="a"), {})

        async def until_rendered(*names: str) -> None:
            async with asyncio.timeout(60):
                rendered: set[str] = set()
                while not {*names} <= rendered:
                    with contextlib.suppress(Unavailable):
                        stored = await bus.figures.subjects_of(
                            subjects.STAGES_STREAM, "pm.stage.engine.>"
                        )
                        rendered = {subjects.last_token(subject) for subject in stored}
                    await asyncio.sleep(0.05)

        await bus.publish_without_id(subjects.request("demo", "before"), data)
        await until_rendered("before")
        await bus.connection.js.delete_stream(stream)
        await bus.publish_without_id(subjects.request("demo", "after"), data)
        await until_rendered("before", "after")
