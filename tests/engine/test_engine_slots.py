"""Engines that pull from slots."""

import asyncio
import secrets

import pytest

from shared.bus.bus import Bus
from shared.client import follow
from shared.config.schema import EngineConfig
from shared.protocol.pipeline import Edge
from shared.protocol.records import Finish
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, RequestTicket, TaskHeader
from shared.stage import tasks
from tests.support.engine import serving_engine
from tests.support.waiting import until

TO_ENGINE = Edge("renderer", "engine", "tokens", "rendered")
SLOTS = 4


async def publish(bus: Bus, model: str, request_id: str, num_slots: int) -> None:
    """Publish a task with the same beginning as all others."""
    ticket = RequestTicket(bus.now_ms(), bus.now_ms() + 60_000, 1, "pm.test.receipt")
    sampling = SamplingParams(max_tokens=2, temperature=0)
    header = TaskHeader(request_id, model, "interactive", ticket, sampling)
    body = EngineBody([7] * 64, [])
    await tasks.publish(bus, TO_ENGINE, header, body, num_slots=num_slots)


@pytest.mark.parametrize("slots", [1, SLOTS])
async def test_a_hot_queue_fills_both_engines(bus: Bus, slots: int) -> None:
    """No step ends, so what an engine has claimed it keeps."""
    model = f"hot-{secrets.token_hex(4)}"
    config = EngineConfig(max_num_seqs=4)
    async with (
        serving_engine(bus, model, config, slots=slots) as first,
        serving_engine(bus, model, config, slots=slots) as second,
    ):
        engines = first, second
        names = [f"{model}-{number}" for number in range(8)]
        for name in names:
            await publish(bus, model, name, slots)
        await until(lambda: sum(engine.load()["held"] for engine in engines) >= len(names))
        loads = [engine.pull_load() for engine in engines]
        num_held = [engine.load()["held"] for engine in engines]
        for engine in engines:
            engine.runner.go_on.release(1000)
        async with asyncio.timeout(20):
            ends = [[record async for record in follow(bus, name)][-1] for name in names]
    assert all(isinstance(end, Finish) for end in ends)
    assert min(num_held) >= 2
    assert all(load >= num / 4 for load, num in zip(loads, num_held, strict=True))


async def test_prompts_that_have_not_begun_count_by_their_tokens(bus: Bus) -> None:
    model = f"long-{secrets.token_hex(4)}"
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=16)
    async with serving_engine(bus, model, config, slots=SLOTS) as engine:
        await publish(bus, model, f"{model}-r", SLOTS)
        await engine.until_held()
        # More than a hit would save, as far as is known at the start: a step's tokens.
        assert engine.pull_load() == 64 / (64 + 16 / 2)
        engine.runner.go_on.release(1000)
        async with asyncio.timeout(20):
            _ = [record async for record in follow(bus, f"{model}-r")]
        await until(lambda: engine.pull_load() == 0.0)
