"""Which requests make a detour, and what becomes of a detour's queue without workers."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.codec import envelope
from shared.config.schema import Config, DeliveryConfig, ModelConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.requests import EmbeddingParams
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, RequestTicket, Task, TaskHeader
from shared.stage.pipelines import pipelines_of
from shared.stage.runtime import Context
from tests.tasks import engine_task
from workers.renderer import detour
from workers.renderer.detour import Detours

LONG, SHORT = EngineBody([1] * 100, []), EngineBody([1] * 99, [])
FIRST: Any = SimpleNamespace(delivery=SimpleNamespace(attempt=1))
AGAIN: Any = SimpleNamespace(delivery=SimpleNamespace(attempt=2))


def context_of(bus: Bus, model: str, **changes: Any) -> Context:
    settings = ModelConfig("nowhere", prefill="prefill", min_prefill_tokens=100)
    config = Config(
        {model: msgspec.structs.replace(settings, **changes)},
        delivery=DeliveryConfig(ack_wait_s=2.0),
    )
    name = f"renderer-{secrets.token_hex(4)}"
    return Context("renderer", name, None, config, bus, structlog.get_logger())


async def beat(bus: Bus, model: str, worker: str = "", **load: float) -> str:
    worker = worker or f"prefill-{secrets.token_hex(4)}"
    await bus.heartbeats.publish(
        worker, to_json(Heartbeat("prefill", worker, "0", 0, [model], load))
    )
    return worker


def header_of(model: str, **changes: Any) -> TaskHeader:
    return msgspec.structs.replace(TaskHeader("r", model, "interactive"), **changes)


async def test_long_prompts_make_a_detour_while_a_worker_is_free(bus: Bus, model: str) -> None:
    detours = Detours(context_of(bus, model), [model])
    assert not await detours.suits(header_of(model), LONG, FIRST)
    await beat(bus, model, oldest_s=0.5)
    detours = Detours(context_of(bus, model), [model])
    assert await detours.suits(header_of(model), LONG, FIRST)
    assert not await detours.suits(header_of(model), SHORT, FIRST)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": SamplingParams(prompt_logprobs=1)},
        {"sampling": SamplingParams(skip_reading_prefix_cache=True)},
        {"embedding": EmbeddingParams()},
        {"round": 1},
    ],
)
async def test_prompts_that_the_engine_has_to_compute_make_none(
    bus: Bus, model: str, changes: dict[str, Any]
) -> None:
    await beat(bus, model)
    detours = Detours(context_of(bus, model), [model])
    assert not await detours.suits(header_of(model, **changes), LONG, FIRST)
    assert await detours.suits(header_of(model), LONG, FIRST)


async def test_a_task_that_comes_again_makes_none(bus: Bus, model: str) -> None:
    await beat(bus, model)
    detours = Detours(context_of(bus, model), [model])
    assert not await detours.suits(header_of(model), LONG, AGAIN)


@pytest.mark.parametrize("load", [{"oldest_s": 1.5}, {"draining": 1.0}])
async def test_a_worker_that_is_late_or_drains_gets_none(
    bus: Bus, model: str, load: dict[str, float]
) -> None:
    await beat(bus, model, "", **load)
    assert not await Detours(context_of(bus, model), [model]).suits(header_of(model), LONG, FIRST)
    # One that is free is enough.
    await beat(bus, model)
    assert await Detours(context_of(bus, model), [model]).suits(header_of(model), LONG, FIRST)


async def test_a_worker_of_another_model_or_stage_gets_none(bus: Bus, model: str) -> None:
    await beat(bus, f"{model}-other")
    worker = f"prefill-{secrets.token_hex(4)}"
    other = Heartbeat("prefill", worker, "0", 0, [model], {}, stage="elsewhere")
    await bus.heartbeats.publish(worker, to_json(other))
    assert not await Detours(context_of(bus, model), [model]).suits(header_of(model), LONG, FIRST)


async def test_a_burst_does_not_go_to_one_worker(
    bus: Bus, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next heartbeat has its amount of work."""
    monkeypatch.setattr(detour, "BEATS_TTL_S", 600.0)
    await beat(bus, model)
    await beat(bus, model)
    await beat(bus, model, oldest_s=2.0)
    detours = Detours(context_of(bus, model), [model])
    went = [await detours.suits(header_of(model), LONG, FIRST) for _ in range(20)]
    assert went == [True] * 2 * detour.MAX_SENT + [False] * (20 - 2 * detour.MAX_SENT)


async def test_requests_of_one_model_leave_room_for_another_model(bus: Bus, model: str) -> None:
    both = [model, f"{model}-other"]
    context = context_of(bus, model)
    context.config.models[both[1]] = context.config.models[model]
    context.pipelines = pipelines_of(context.config)
    for name in both:
        await beat(bus, name)
    detours = Detours(context, both)
    went = [await detours.suits(header_of(model), LONG, FIRST) for _ in range(8)]
    assert went == [True] * detour.MAX_SENT + [False] * (8 - detour.MAX_SENT)
    assert await detours.suits(header_of(both[1]), LONG, FIRST)


async def test_without_a_detour_the_bus_is_not_used(model: str) -> None:
    """The bus has nothing else, and would fail."""
    bus: Any = SimpleNamespace(queues=SimpleNamespace(on_tasks_lost=lambda _: None))
    context = context_of(bus, model, prefill="engine")
    detours = Detours(context, [model])
    assert not await detours.suits(header_of(model), LONG, FIRST)
    await detours.run()


@contextlib.asynccontextmanager
async def forwarding(bus: Bus, model: str) -> AsyncIterator[Detours]:
    context = context_of(bus, model)
    detours = Detours(context, [model])
    running = asyncio.create_task(detours.run())
    try:
        yield detours
    finally:
        context.shutdown.signal()
        await running


async def put(bus: Bus, model: str) -> str:
    name, now_ms = f"r-{secrets.token_hex(6)}", bus.now_ms()
    ticket = RequestTicket(now_ms, now_ms + 60_000, 1, "pm.test.receipt")
    task = engine_task(name, LONG.prompt_token_ids, model=model, lane="interactive", ticket=ticket)
    subject = subjects.stage("prefill", model, "interactive", name)
    await bus.publish(subject, envelope.encode(task, []), name)
    return name


@pytest.fixture
async def engines(bus: Bus, model: str) -> AsyncIterator[Consumer]:
    """The engines' queue."""
    consumer = await bus.queues.consume(
        subjects.STAGES_STREAM,
        subjects.stage_consumer("engine", model, "interactive"),
        subjects.stage_filter("engine", model, "interactive"),
        8,
        30.0,
    )
    yield consumer
    await consumer.stop()


async def test_a_renderer_that_starts_leaves_the_queue_to_unknown_workers(
    bus: Bus, model: str, engines: Consumer
) -> None:
    """Workers send a heartbeat every second, and a broker that restarts has lost them all."""
    await put(bus, model)

    async def stay_alive() -> None:
        await asyncio.sleep(1)
        worker = await beat(bus, model)
        while True:
            await asyncio.sleep(0.3)
            await beat(bus, model, worker)

    alive = asyncio.create_task(stay_alive())
    async with forwarding(bus, model):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engines.next(), 4)
    alive.cancel()


async def test_renderers_forward_what_no_worker_is_left_to_take(
    bus: Bus, model: str, engines: Consumer
) -> None:
    worker = await beat(bus, model)

    async def stay_alive(model: str, worker: str) -> None:
        while True:
            await beat(bus, model, worker)
            await asyncio.sleep(0.3)

    alive = asyncio.create_task(stay_alive(model, worker))
    # By the heartbeats of others it is known that one is missing.
    other = asyncio.create_task(stay_alive("other", "prefill-other"))
    async with forwarding(bus, model):
        name = await put(bus, model)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engines.next(), 2.5)
        alive.cancel()
        delivery = await asyncio.wait_for(engines.next(), 20)
    other.cancel()
    await delivery.ack()
    task, _ = envelope.decode(delivery.data, Task[EngineBody])
    assert (task.header.request_id, task.body) == (name, LONG)
