"""Tasks that a broker has lost and a coordinator makes again: their workers keep the requests."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.heartbeats import DEAD_AFTER_S
from shared.bus.stream_keeper import TaskStream
from shared.codec import envelope
from shared.config.schema import DeliveryConfig
from shared.protocol import subjects
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.records import ChoiceDelta
from shared.protocol.task_messages import EngineBody, RequestTicket, Task, TaskHeader
from shared.stage.job import Job
from shared.stage.stage import Stage
from shared.state.token_log import LogWriter
from shared.telemetry.metrics import Metrics
from tests.shared.stage.test_stage import EveryModel, consume, next_job
from tests.support.waiting import until

ACK_WAIT_S = 0.5
DELTA = [ChoiceDelta(0, 0, [1], "a")]


@pytest.fixture
def names() -> str:
    """The name of a model, and of its only request."""
    return f"lost-{secrets.token_hex(4)}"


@pytest.fixture
async def inbox(bus: Bus, names: str) -> AsyncIterator[Consumer]:
    inbox = await consume(bus, "engine", names, ack_wait_s=30.0)
    yield inbox
    await inbox.stop()


def engine_stage(bus: Bus, worker: str, ack_wait_s: float = 30.0) -> Stage:
    policy = DeliveryConfig(ack_wait_s=ack_wait_s)
    return Stage(bus, "engine", worker, "0", policy, Metrics("engine", worker), EveryModel())


async def put(bus: Bus, name: str, accepted_ms: float, receipt: str = "") -> None:
    """Publish the task of the engine, as often as its broker has lost it."""
    ticket = RequestTicket(accepted_ms, accepted_ms + 60_000, 1, receipt)
    task = Task(TaskHeader(name, name, "interactive", ticket), EngineBody([1], []))
    subject = subjects.stage("engine", name, "interactive", name)
    msg_id = subjects.stage_msg_id("engine", name, ticket.place, 0)
    await bus.publish(subject, envelope.encode(task, []), msg_id)


async def claim(stage: Stage, inbox: Consumer, accepted_ms: float) -> tuple[Job, LogWriter | None]:
    job = await next_job(stage, inbox, RequestTicket(accepted_ms, accepted_ms + 60_000, 1, ""))
    job.body = EngineBody([1], [])
    return job, await stage.claim(job)


async def attempts(bus: Bus, name: str) -> list[AttemptRecord]:
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(name))
    return [attempt for message in stored if (attempt := decode_attempt(message.data))]


def lose_tasks_before(bus: Bus, seconds: float) -> None:
    """Let this worker know that all tasks were lost some seconds ago."""
    since_ms = bus.now_ms() - 1000 * seconds
    bus.streams.tasks = TaskStream(since_ms, bus.streams.tasks.first_sequence)


async def let_live(bus: Bus, *workers: str) -> None:
    for worker in workers:
        await bus.heartbeats.publish(worker, b"")


async def test_a_task_that_is_made_again_takes_the_place_of_the_lost_one(
    own_bus: Bus, own_broker: EmbeddedServer, names: str
) -> None:
    stage = engine_stage(own_bus, "engine-one")
    own_bus.queues.on_tasks_lost(stage.claims.record_again)
    inbox, accepted_ms = await consume(own_bus, "engine", names, 30.0), own_bus.now_ms()
    await put(own_bus, names, accepted_ms)
    job, log = await claim(stage, inbox, accepted_ms)
    assert log is not None
    lost, before = job.delivery, await attempts(own_bus, names)
    own_broker.stop()
    own_broker.start()
    await until(lambda: lost.is_lost)
    await put(own_bus, names, accepted_ms, receipt="new")
    assert stage.receive(await asyncio.wait_for(inbox.next(), 10)) is None
    assert not job.delivery.is_lost
    assert job.ticket is not None
    assert job.ticket.receipt == "new"
    await until(lambda: attempts(own_bus, names))
    assert await attempts(own_bus, names) == before
    await job.delivery.ack()
    assert inbox.num_in_flight == 0
    assert (await own_bus.figures.size(subjects.STAGES_STREAM))[0] == 0


@pytest.mark.parametrize("lost_before_s", [0.0, DEAD_AFTER_S + 1])
async def test_a_request_is_left_to_a_live_worker_until_it_lets_go(
    bus: Bus, inbox: Consumer, names: str, lost_before_s: float
) -> None:
    one, two = [engine_stage(bus, f"{n}-{names}") for n in ("one", "two")]
    await let_live(bus, one.worker, two.worker)
    accepted_ms = bus.now_ms() - 60_000
    lose_tasks_before(bus, lost_before_s)
    await put(bus, names, accepted_ms)
    job, log = await claim(one, inbox, accepted_ms)
    assert log is not None
    await log.tokens(DELTA)
    await job.delivery.retry(0)
    other, claimed = await claim(two, inbox, accepted_ms)
    assert claimed is None
    assert [attempt.worker for attempt in await attempts(bus, names)] == [one.worker]
    await one.close_attempt(job)
    other, claimed = await claim(two, inbox, accepted_ms)
    assert claimed is not None
    await other.delivery.ack()


async def test_a_worker_without_progress_loses_a_task_that_was_made_again(
    bus: Bus, inbox: Consumer, names: str
) -> None:
    one, two = [engine_stage(bus, f"{n}-{names}", ACK_WAIT_S) for n in ("one", "two")]
    accepted_ms = bus.now_ms() - 60_000
    lose_tasks_before(bus, DEAD_AFTER_S + 1)
    await put(bus, names, accepted_ms)
    job, log = await claim(one, inbox, accepted_ms)
    assert log is not None
    await log.tokens(DELTA)
    await job.delivery.retry(0)
    written = await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens(names))
    assert written is not None
    claimed = None
    while claimed is None:
        await let_live(bus, one.worker, two.worker)
        other, claimed = await claim(two, inbox, accepted_ms)
    assert bus.now_ms() >= written.stored_ms + 1000 * ACK_WAIT_S
    assert other.history.deaths == 0
    await other.delivery.ack()


async def test_a_dead_worker_loses_a_task_that_was_made_again_at_once(
    bus: Bus, inbox: Consumer, names: str
) -> None:
    """The first worker has never had a heartbeat."""
    one, two = [engine_stage(bus, f"{n}-{names}") for n in ("one", "two")]
    await let_live(bus, two.worker)
    accepted_ms = bus.now_ms() - 60_000
    lose_tasks_before(bus, DEAD_AFTER_S + 1)
    await put(bus, names, accepted_ms)
    job, log = await claim(one, inbox, accepted_ms)
    assert log is not None
    await log.tokens(DELTA)
    await job.delivery.retry(0)
    other, claimed = await claim(two, inbox, accepted_ms)
    assert claimed is not None
    await other.delivery.ack()


async def test_records_that_are_written_again_have_their_outcome(
    bus: Bus, inbox: Consumer, names: str
) -> None:
    """Otherwise the attempt would count as one of a worker that has died later."""
    stage, accepted_ms = engine_stage(bus, f"one-{names}"), bus.now_ms()
    await put(bus, names, accepted_ms)
    job, _ = await claim(stage, inbox, accepted_ms)
    await stage.close_attempt(job)
    await bus.purge(subjects.ATTEMPTS_STREAM, subjects.attempts(names))
    stage.claims.record_again()

    async def outcomes() -> list[str]:
        return [attempt.outcome for attempt in await attempts(bus, names)]

    async def are_there() -> bool:
        return len(await outcomes()) == 2

    await until(are_there)
    assert await outcomes() == ["open", "requeued"]
    await job.delivery.ack()
