"""Queues of slots: tasks are published there, owners change, and no queue remains unread."""

import asyncio
import contextlib
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.bus import Bus
from shared.bus.slot_consumer import SlotConsumer
from shared.client import follow
from shared.codec.envelope import TensorData
from shared.config.schema import Config, DeliveryConfig, ModelConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.pipeline import Edge
from shared.protocol.records import ChoiceDelta, Finish, OutputSummary, Usage
from shared.protocol.task_messages import EngineBody, RequestTicket, Task, TaskHeader
from shared.stage import tasks
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.slot_queues import find_slots
from shared.stage.slots import owners_of
from shared.stage.worker_loop import Done, Outcome, WorkerLoop, create_queues
from tests.support.waiting import until

TO_ENGINE = Edge("renderer", "engine", "tokens", "rendered")
NAMES = st.sets(st.text(min_size=1), min_size=1, max_size=8)


def make_context(bus: Bus, model: str, slots: int, worker: str = "") -> Context:
    delivery = DeliveryConfig(ack_wait_s=1.0, retry_delay_s=0.1, drain_s=5.0)
    config = Config({model: ModelConfig("nowhere", slots=slots)}, delivery=delivery)
    worker = worker or f"engine-{secrets.token_hex(4)}"
    return Context("engine", worker, model, config, bus, structlog.get_logger())


async def publish(bus: Bus, model: str, request_id: str, num_slots: int, text: int = 0) -> bool:
    """Publish an engine's task as a renderer does."""
    ticket = RequestTicket(bus.now_ms(), bus.now_ms() + 60_000, 1, "pm.test.receipt")
    header = TaskHeader(request_id, model, "interactive", ticket)
    body = EngineBody([text] * 64, [])
    return await tasks.publish(bus, TO_ENGINE, header, body, num_slots=num_slots)


async def subjects_of(bus: Bus, model: str) -> list[str]:
    all_subjects = await bus.figures.subjects_of(subjects.STAGES_STREAM, subjects.STAGES_FILTER)
    return [subject for subject in all_subjects if subjects.model_of_stage(subject) == model]


@contextlib.asynccontextmanager
async def serving(
    context: Context, model: str, handle: Callable[[str], None]
) -> AsyncIterator[WorkerLoop]:
    async def on_task(task: Task[EngineBody], _: list[TensorData], job: Job) -> Outcome:
        assert job.log is not None
        await job.log.tokens([ChoiceDelta(0, 0, [1], "a", finish_reason="stop")])
        handle(task.header.request_id)
        return Done(OutputSummary(Usage(1, 1), 1))

    await context.bus.add_responder("pm.test.receipt", lambda receipt: b"+OK")
    loop = WorkerLoop(context)
    await loop.add_stage([model], 4, EngineBody, on_task, lambda: 0.0)
    running = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        context.shutdown.signal()
        await running


@given(NAMES, st.integers(1, 64))
def test_engines_own_equal_shares_of_the_slots(engines: set[str], num_slots: int) -> None:
    owners = owners_of(range(num_slots), engines)
    assert [*owners] == [*range(num_slots)]
    share = num_slots / len(engines)
    assert all(count <= math.ceil(share) for count in Counter(owners.values()).values())
    assert owners == owners_of(range(num_slots), sorted(engines))


def test_an_engine_that_comes_moves_few_other_slots() -> None:
    moved = 0
    for number in range(100):
        engines = [f"engine-{number}-{n}" for n in range(4)]
        before, after = owners_of(range(64), engines[:3]), owners_of(range(64), engines)
        moved += sum(after[slot] not in (before[slot], engines[3]) for slot in before)
    assert moved < 0.1 * 64 * 100


async def test_a_task_is_in_the_queue_of_its_slot_once(bus: Bus, model: str) -> None:
    assert await publish(bus, model, f"{model}-r", 16)
    await publish(bus, model, f"{model}-r", 16)
    (subject,) = await subjects_of(bus, model)
    slot = subjects.slot_of_stage(subject)
    assert subject == subjects.stage("engine", model, "interactive", f"{model}-r", slot)
    stored = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(f"{model}-r"))
    assert stored is not None
    assert stored.subject == subject


async def test_coordinators_make_the_consumers_of_all_slots(bus: Bus, model: str) -> None:
    await create_queues(make_context(bus, model, 4))
    queues = {depth.subject for depth in await bus.figures.depths(subjects.STAGES_STREAM)}
    for lane in subjects.LANES:
        filters = {subjects.stage_filter("engine", model, lane, slot) for slot in (None, *range(4))}
        assert filters <= queues
        assert subjects.stage_filter("renderer", model, lane) in queues
        assert subjects.stage_filter("renderer", model, lane, 0) not in queues


@pytest.mark.parametrize(("before", "after"), [(1, 16), (16, 1), (16, 4)])
async def test_tasks_of_another_number_of_slots_are_all_done(
    bus: Bus, model: str, before: int, after: int
) -> None:
    """The queues and some of the tasks come from the earlier configuration."""
    await create_queues(make_context(bus, model, before))
    names = [f"{model}-{number}" for number in range(24)]
    for number, name in enumerate(names[:12]):
        await publish(bus, model, name, before, text=number)
    done: set[str] = set()
    context = make_context(bus, model, after)
    await create_queues(context)
    async with serving(context, model, done.add):
        for number, name in enumerate(names[12:]):
            await publish(bus, model, name, before if number % 2 else after, text=number)

        async def is_empty() -> bool:
            return not await subjects_of(bus, model)

        await until(is_empty)
    assert done == {*names}


class Fleet:
    """A coordinator, two renderers and two engines, each with a separate number of slots."""

    def __init__(self, bus: Bus, model: str, num_slots: int) -> None:
        self.done: list[str] = []
        self._bus, self._model = bus, model
        self._num_published = 0
        self._renderers = [num_slots] * 2
        self._engines = [contextlib.AsyncExitStack() for _ in range(2)]

    async def restart(self, role: str, num_slots: int) -> None:
        """Replace the workers of a role one after another; requests come in between."""
        if role == "coordinator":
            await create_queues(make_context(self._bus, self._model, num_slots))
            return
        for number in range(2):
            if role == "renderer":
                self._renderers[number] = num_slots
            else:
                await self._engines[number].aclose()
                context = make_context(self._bus, self._model, num_slots)
                running = serving(context, self._model, self.done.append)
                await self._engines[number].enter_async_context(running)
            await self.send(20)

    async def send(self, count: int) -> None:
        """Publish tasks of both renderers in turns."""
        for number in range(self._num_published, self._num_published + count):
            num_slots = self._renderers[number % 2]
            await publish(self._bus, self._model, f"{self._model}-{number}", num_slots, number % 24)
        self._num_published += count

    async def stop(self) -> None:
        for engine in self._engines:
            await engine.aclose()


# The second order is the worse: for a while, no engine knows the queues that renderers write to.
@pytest.mark.parametrize(
    "order", [("coordinator", "engine", "renderer"), ("renderer", "engine", "coordinator")]
)
@pytest.mark.parametrize(
    ("before", "after"), [(1, 16), pytest.param(16, 1, marks=pytest.mark.long)]
)
async def test_every_order_of_restarts_serves_all_requests_once(
    bus: Bus, model: str, order: tuple[str, ...], before: int, after: int
) -> None:
    fleet = Fleet(bus, model, before)
    try:
        await fleet.restart("coordinator", before)
        await fleet.restart("engine", before)
        await fleet.send(40)
        for role in order:
            await fleet.restart(role, after)
        await fleet.send(40)

        async def is_empty() -> bool:
            return not await subjects_of(bus, model)

        await until(is_empty)
    finally:
        await fleet.stop()
    assert sorted(fleet.done) == sorted(f"{model}-{number}" for number in range(200))
    for name in fleet.done:
        assert isinstance([record async for record in follow(bus, name)][-1], Finish)


async def test_workers_with_and_without_slots_serve_all_queues_together(
    bus: Bus, model: str
) -> None:
    done: list[str] = []
    contexts = [make_context(bus, model, slots) for slots in (1, 16)]
    async with serving(contexts[0], model, done.append), serving(contexts[1], model, done.append):
        for number in range(12):
            await publish(bus, model, f"{model}-{number}", 16 if number % 2 else 1, text=number)

        async def is_empty() -> bool:
            return not await subjects_of(bus, model)

        await until(is_empty)
    assert len(done) == 12


async def test_a_worker_without_slots_has_one_consumer_a_lane(bus: Bus, model: str) -> None:
    context = make_context(bus, model, 1)
    assert await find_slots(context, model) == []
    async with serving(context, model, print) as loop:
        assert not any(isinstance(consumer, SlotConsumer) for consumer in loop.consumers.values())


async def test_an_owner_is_one_of_the_workers_with_a_heartbeat(bus: Bus, model: str) -> None:
    context = make_context(bus, model, 16, "engine-1")
    async with serving(context, model, print) as loop:
        consumers = [
            consumer for consumer in loop.consumers.values() if isinstance(consumer, SlotConsumer)
        ]
        assert len(consumers) == len(subjects.LANES)

        def owned() -> list[set[int]]:
            return [
                {q.slot for q in consumer.queues.values() if q.is_owned and q.slot is not None}
                for consumer in consumers
            ]

        other = Heartbeat("engine", "engine-2", "1", 1, [model], {})
        foreign = Heartbeat("engine", "engine-3", "1", 1, ["other"], {})

        async def is_alone() -> bool:
            await bus.heartbeats.publish(foreign.worker, to_json(foreign))
            return owned() == [{*range(16)}] * 2

        await until(is_alone)
        owners = owners_of(range(16), ["engine-1", "engine-2"])
        expected = {slot for slot, owner in owners.items() if owner == "engine-1"}
        assert len(expected) == 8

        async def has_company() -> bool:
            for beat in (other, foreign):
                await bus.heartbeats.publish(beat.worker, to_json(beat))
            return owned() == [expected] * 2

        await until(has_company)
        await until(is_alone)
