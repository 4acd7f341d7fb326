"""Answers of a worker's metrics listener to health checks."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import Config, DeliveryConfig, MetricsConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.worker_status import decode_status
from shared.stage import probes
from shared.stage.runtime import UNHEARD_S, Context
from tests.support.waiting import until

CONFIG = Config(models={}, metrics=MetricsConfig("127.0.0.1"))


@pytest.fixture
async def context(bus: Bus) -> AsyncIterator[Context]:
    context = Context("renderer", "renderer-1", None, CONFIG, bus, structlog.get_logger())
    await context.open_metrics()
    yield context
    await context.close()


async def ask(context: Context, path: str) -> tuple[int, str]:
    """Return the HTTP status and the worker's status."""
    return await asyncio.to_thread(_ask, context, path)


async def until_answered(context: Context, answer: tuple[int, str]) -> None:
    async def is_answered() -> bool:
        return await ask(context, "/ready") == answer

    await until(is_answered)


def _ask(context: Context, path: str) -> tuple[int, str]:
    assert context.metrics_address is not None
    host, port = context.metrics_address
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as answer:
            code, body = answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        code, body = refused.code, refused.read()
    status = decode_status(body)
    assert status is not None
    assert (status.role, status.worker) == ("renderer", "renderer-1")
    return code, status.status


async def test_a_worker_is_ready_from_its_first_heartbeat_to_its_drain(context: Context) -> None:
    assert await ask(context, "/ready") == (503, "starting")
    context.ready([], dict)
    assert await ask(context, "/ready") == (200, "ok")
    context.shutdown.signal()
    assert await ask(context, "/ready") == (503, "draining")
    assert await ask(context, "/health") == (200, "ok")


async def test_metrics_name_the_stage_of_a_worker(bus: Bus) -> None:
    log = structlog.get_logger()
    context = Context("generator", "generator-1", None, CONFIG, bus, log, "vae")
    await context.open_metrics()
    (series,) = [one for one in context.metrics.snapshot().series if one.name == "info"]
    await context.close()
    assert (series.labels["role"], series.labels["stage"]) == ("generator", "vae")


@pytest.fixture
async def alone(own_broker: EmbeddedServer) -> AsyncIterator[Context]:
    """A worker that is ready, without the streams of its broker."""
    bus = await Bus.connect(own_broker.url, "test")
    context = Context("renderer", "renderer-1", None, CONFIG, bus, structlog.get_logger())
    await context.open_metrics()
    context.ready([], dict)
    yield context
    await context.close()
    await bus.close()


async def test_a_worker_without_a_broker_lives_and_is_not_ready(
    own_broker: EmbeddedServer, alone: Context
) -> None:
    await asyncio.to_thread(own_broker.stop)
    await until(lambda: not alone.bus.is_connected)
    assert await ask(alone, "/ready") == (503, "no broker")
    assert await ask(alone, "/health") == (200, "ok")


async def test_a_worker_without_streams_lives_and_is_not_ready(alone: Context) -> None:
    alone._heard_s -= UNHEARD_S  # As long ago as that.
    assert await ask(alone, "/ready") == (503, "no streams")
    assert await ask(alone, "/health") == (200, "ok")
    await alone.bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    await until_answered(alone, (200, "ok"))


async def test_a_worker_whose_queue_is_lost_is_not_ready_and_says_so_to_gateways(
    own_broker: EmbeddedServer,
) -> None:
    bus = await Bus.connect(own_broker.url, "test")

    async def has_load() -> bool:
        return any(beat.load for beat in await bus.heartbeats.read())

    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    context = Context("renderer", "renderer-1", None, CONFIG, bus, structlog.get_logger())
    try:
        await context.open_metrics()
        queue = subjects.stage_consumer("renderer", "demo", "batch")
        where = subjects.stage_filter("renderer", "demo", "batch")
        await bus.queues.consume(subjects.STAGES_STREAM, queue, where, 1, 30.0)
        context.ready(["demo"], dict)
        bus.streams.creates_streams = False
        await bus.connection.js.delete_stream(subjects.STAGES_STREAM)
        await until_answered(context, (503, "no queue"))
        await until(has_load)
        bus.streams.creates_streams = True
        await until_answered(context, (200, "ok"))
        while await has_load():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    finally:
        await context.close()
        await bus.close()


async def test_a_worker_whose_event_loop_hangs_does_not_live(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "LOOP_TIMEOUT_S", 0.05)
    with ThreadPoolExecutor(1) as pool:
        # The loop is blocked until the answer arrives.
        assert pool.submit(_ask, context, "/health").result(10) == (503, "hangs")
