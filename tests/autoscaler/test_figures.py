"""Figures of pools: what is missing is None, and requests on their way count for their model."""

import asyncio
from collections import Counter

import pytest
import structlog

from shared.bus.bus import Bus
from shared.config.schema import Config, EnginePool, ModelConfig, PoolConfig, ScaleConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat, WorkerSlot
from shared.scaling.pools import PoolFigures, WorkerLoad
from shared.state import scale_state
from tests.autoscaler.conftest import ENCODER, ENGINE, beat, report, two_pools
from workers.autoscaler.figures import Look, Queue, Reader, figures_of
from workers.autoscaler.presence import Workers
from workers.pools import pools_of

POOLS = two_pools()
EMPTY = Queue(0, 0, 0.0)
NOBODY = Workers()


def look(queues: dict[tuple[str, str, str], Queue], engines: Workers = NOBODY) -> Look:
    return Look(queues, {ENGINE: engines, ENCODER: NOBODY}, {})


def queues(stage: str, *lanes: Queue) -> dict[tuple[str, str, str], Queue]:
    return {(stage, "demo", lane): queue for lane, queue in zip(subjects.LANES, lanes, strict=True)}


def test_both_lanes_count_and_workers_are_those_that_are_ready() -> None:
    engines = Workers(
        (WorkerLoad("1"), WorkerLoad("2", 0, 5)), {"3": 4.0}, 1, (WorkerLoad("engine-9"),), (4.5,)
    )
    read = queues("engine", Queue(3, 1, 2.5), Queue(2, 4, 7.0)) | queues("encoder", EMPTY, EMPTY)
    assert figures_of(POOLS, look(read, engines), Counter()) == {
        ENGINE: PoolFigures(5, 5, 7.0, 2, {"3": 4.0}, 1, 1, 0, num_others=1, cold_starts_s=(4.5,)),
        ENCODER: PoolFigures(0, 0, 0.0, 0),
    }


def test_a_pool_without_one_of_its_queues_has_no_figures() -> None:
    read = queues("engine", EMPTY, EMPTY)
    del read["engine", "demo", "batch"]
    figures = figures_of(POOLS, look(read | queues("encoder", EMPTY, EMPTY)), Counter())
    assert figures[ENGINE] is None
    assert figures[ENCODER] is not None


def test_a_pool_that_the_actuator_knows_nothing_of_has_no_figures() -> None:
    read = queues("engine", EMPTY, EMPTY) | queues("encoder", EMPTY, EMPTY)
    figures = figures_of(POOLS, Look(read, {ENCODER: NOBODY}, {}), Counter())
    assert figures[ENGINE] is None
    assert figures[ENCODER] is not None


def test_requests_that_were_heard_or_are_with_a_renderer_wake_the_pools_of_their_model() -> None:
    read = queues("engine", EMPTY, EMPTY) | queues("encoder", EMPTY, EMPTY)
    read |= queues("renderer", Queue(2, 1, 0.1), EMPTY)
    read["renderer", "other", "batch"] = Queue(100, 0, 0.1)
    pools = figures_of(POOLS, look(read), Counter(demo=4, other=50))
    assert [figures and figures.num_arrived for figures in pools.values()] == [7, 7]


async def publish(bus: Bus, *beats: Heartbeat) -> None:
    for heartbeat in beats:
        await bus.heartbeats.publish(heartbeat.worker, to_json(heartbeat))


@pytest.fixture
async def reader(bus: Bus) -> Reader:
    for stream in (subjects.SCALE_STREAM, subjects.WORKERS_STREAM):
        await bus.purge(stream, ">")
    return Reader(bus, "autoscaler-1", POOLS)


def test_pools_of_one_queue_divide_its_tasks_by_priority() -> None:
    """The second pool gets what the first one has no room for."""
    entries = [
        PoolConfig(role="engine", pool="small", max=4, per_engine=10),
        PoolConfig(role="engine", pool="large", max=2, per_engine=20, priority=1),
    ]
    model = ModelConfig("demo", pools={"small": EnginePool(), "large": EnginePool()})
    pools = pools_of(Config({"demo": model}, scale=ScaleConfig(entries)))
    workers = dict.fromkeys(pools.by_name, NOBODY)

    def tasks(pending: int, in_flight: int) -> dict[str, tuple[int, int, float, int]]:
        read = queues("engine", Queue(pending, in_flight, 3.0), EMPTY)
        figures = figures_of(pools, Look(read, workers, {}), Counter(demo=1))
        return {
            name: (f.pending, f.in_flight, f.oldest_s, f.num_arrived)
            for name, f in figures.items()
            if f is not None
        }

    large, small = "engine.large/demo", "engine.small/demo"
    assert tasks(5, 7) == {large: (5, 7, 3.0, 1), small: (0, 0, 0.0, 0)}
    assert tasks(60, 30) == {large: (10, 30, 3.0, 1), small: (20, 30, 3.0, 0)}
    assert tasks(900, 0) == {large: (40, 0, 3.0, 1), small: (860, 0, 3.0, 0)}


async def test_nothing_is_known_without_the_actuator_or_the_own_heartbeat(
    bus: Bus, reader: Reader
) -> None:
    """A broker that has lost its heartbeats reports none, which must not look like no workers."""
    own = Heartbeat("autoscaler", "autoscaler-1", "1", 1, [], {})
    await publish(bus, own, beat(70))
    with structlog.testing.capture_logs() as lines:
        assert await reader.look() is await reader.look() is None
    # It is logged once, not at each look.
    (line,) = lines
    assert (line["event"], line["reason"]) == ("no_figures", "no actuator reports workers")
    await scale_state.write_report(bus, report([WorkerSlot(7, 70)]))
    view = await reader.look()
    assert view is not None
    assert view.actuators == {ENGINE: "actuator-1"}
    assert [load.name for load in view.workers[ENGINE].ready] == ["7"]
    assert ENCODER not in view.workers
    await bus.purge(subjects.WORKERS_STREAM, subjects.heartbeat("autoscaler-1"))
    assert await reader.look() is None


async def test_an_actuator_that_has_ended_is_missing(
    bus: Bus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(bus, Heartbeat("autoscaler", "autoscaler-1", "1", 1, [], {}))
    await scale_state.write_report(bus, report([]))
    assert await reader.look() is not None
    now_ms = bus.now_ms
    monkeypatch.setattr(bus, "now_ms", lambda: now_ms() + 1000 * scale_state.REPORT_AGE_S)
    assert await reader.look() is None


async def test_workers_of_a_new_actuator_start_although_their_process_ids_are_old(
    bus: Bus, reader: Reader
) -> None:
    """A container that was replaced has the same slots and process ids."""
    own = Heartbeat("autoscaler", "autoscaler-1", "1", 1, [], {})
    await publish(bus, own, beat(7))
    await scale_state.write_report(bus, report([WorkerSlot(0, 7)], "actuator-1"))
    first = await reader.look()
    assert first is not None
    assert [load.name for load in first.workers[ENGINE].ready] == ["0"]
    await bus.purge(subjects.WORKERS_STREAM, subjects.heartbeat("engine-7"))
    await scale_state.write_report(bus, report([WorkerSlot(0, 7)], "actuator-2"))
    second = await reader.look()
    assert second is not None
    assert (second.workers[ENGINE].ready, [*second.workers[ENGINE].starting]) == ((), ["0"])
    assert second.actuators == {ENGINE: "actuator-2"}


async def test_a_broker_that_hangs_leaves_no_figures(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("workers.autoscaler.figures.LOOK_TIMEOUT_S", 0.05)
    monkeypatch.setattr("workers.autoscaler.figures.read_report", hang)
    assert await reader.look() is None


async def test_the_queues_of_all_slots_are_one(bus: Bus, reader: Reader) -> None:
    name, lane = "slotted", "batch"
    for slot, num_tasks in ((None, 1), (0, 2), (1, 0), (2, 3)):
        durable = subjects.stage_consumer(name, "demo", lane, slot)
        filter_ = subjects.stage_filter(name, "demo", lane, slot)
        await bus.queues.create(subjects.STAGES_STREAM, durable, filter_, 1.0)
        for number in range(num_tasks):
            request_id = f"slotted-{slot}-{number}"
            subject = subjects.stage(name, "demo", lane, request_id, slot)
            await bus.publish(subject, b"", request_id)
    await publish(bus, Heartbeat("autoscaler", "autoscaler-1", "1", 1, [], {}))
    await scale_state.write_report(bus, report([]))
    view = await reader.look()
    assert view is not None
    assert view.queues[name, "demo", lane].pending == 6


async def test_queues_of_the_broker_have_the_age_of_their_oldest_task(
    bus: Bus, reader: Reader
) -> None:
    name, subject = "scaled", subjects.stage("scaled", "demo", "batch", "r1")
    durable = subjects.stage_consumer(name, "demo", "batch")
    filter_ = subjects.stage_filter(name, "demo", "batch")
    await bus.queues.create(subjects.STAGES_STREAM, durable, filter_, 1.0)
    await bus.publish(subject, b"", "r1:1:scaled:0")
    await publish(bus, Heartbeat("autoscaler", "autoscaler-1", "1", 1, [], {}))
    await scale_state.write_report(bus, report([]))
    view = await reader.look()
    assert view is not None
    queue = view.queues[name, "demo", "batch"]
    assert (queue.pending, queue.in_flight) == (1, 0)
    assert 0.0 <= queue.oldest_s < 60.0
