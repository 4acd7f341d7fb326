"""Checks of what a scale-down must keep, each with the planted bug that it must see."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from ops.chaos.bugs import scaling
from shared.protocol import subjects
from shared.protocol.messages import WorkerSlot
from shared.scaling.memory import Memory
from shared.scaling.policy import decide
from shared.scaling.pools import PoolDecision
from tests.autoscaler.conftest import ENCODER, ENGINE, beat, report, two_pools
from workers.autoscaler import figures
from workers.autoscaler.figures import Look, Queue, figures_of
from workers.autoscaler.presence import Presence, Workers
from workers.roles import WorkerSpec
from workers.supervisor.pool import SupervisedPools
from workers.supervisor.supervisor import Process, Supervisor

# A worker that drains at SIGTERM, and says when it is ready for it.
DRAINS = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"
QUEUES = {
    (stage, "demo", lane): Queue(0, 0, 0.0)
    for stage in ("engine", "encoder")
    for lane in subjects.LANES
}
LONG_S = 10_000.0


async def workers_that_go_have_drained() -> None:
    async def spawn(worker: WorkerSpec) -> Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("sh", "-c", DRAINS, stdout=pipe)
        assert process.stdout is not None
        await process.stdout.readline()
        return process

    supervisor = Supervisor(spawn, 20.0, lambda worker, code: None)
    pools = SupervisedPools(supervisor, two_pools().by_name.values())
    try:
        pools.wanted(ENGINE, 1)
        async with asyncio.timeout(30):
            slots = await _running(pools)
            process = supervisor.processes[slots[0].slot]
            pools.wanted(ENGINE, 0, drain=[slots[0].slot])
            code = await process.wait()
    finally:
        await supervisor.stop()
    assert code == 0


async def a_missing_queue_stops_no_worker() -> None:
    """One worker has a task in the queue that is missing in the second look."""
    pool = two_pools().by_name[ENGINE]
    engines = Presence(pool).look(report([WorkerSlot(7, 70)]), [beat(70)], 0.0)
    workers = {ENGINE: engines, ENCODER: Workers()}
    busy = QUEUES | {("engine", "demo", "batch"): Queue(0, 1, 0.0)}
    missing = {key: queue for key, queue in busy.items() if key != ("engine", "demo", "batch")}
    memory: Memory = {}
    decision, memory = _decide(Look(busy, workers, {}), memory, 0.0)
    assert decision.target == 1
    decision, _ = _decide(Look(missing, workers, {}), memory, LONG_S)
    assert (decision.target, decision.reason) == (1, "no_figures")


async def a_silent_worker_is_not_given_up() -> None:
    """The process lives on, and its heartbeats were lost with the broker."""
    presence = Presence(two_pools().by_name[ENGINE])
    slots = report([WorkerSlot(7, 70)])
    presence.look(slots, [beat(70)], 0.0)
    presence.look(slots, [], 1.0)
    workers = presence.look(slots, [], LONG_S)
    decision, _ = _decide(Look(QUEUES, {ENGINE: workers, ENCODER: Workers()}, {}), {}, LONG_S)
    assert decision.give_up == ()


async def _running(pools: SupervisedPools) -> list[WorkerSlot]:
    while True:
        if slots := [slot for slot in pools.running(ENGINE) if slot.pid]:
            return slots
        await asyncio.sleep(0.01)


def _decide(look: Look, memory: Memory, now_s: float) -> tuple[PoolDecision, Memory]:
    pools = two_pools()
    decisions, memory = decide(pools.scaling, figures_of(pools, look, Counter()), memory, now_s)
    return decisions[ENGINE], memory


Check = Callable[[], Awaitable[None]]
CHECKS: list[tuple[Check, Callable[[], None], tuple[object, str]]] = [
    (
        workers_that_go_have_drained,
        scaling.scale_down_by_sigkill,
        (Supervisor, "_end_later"),
    ),
    (a_missing_queue_stops_no_worker, scaling.missing_read_as_zero, (figures, "_figures_of")),
    (a_silent_worker_is_not_given_up, scaling.silence_read_as_no_workers, (Presence, "_load_of")),
]


@pytest.mark.parametrize("check", [check for check, _, _ in CHECKS])
async def test_the_product_passes(check: Check) -> None:
    await check()


@pytest.mark.parametrize(("check", "plant", "place"), CHECKS)
async def test_the_planted_bug_is_seen(
    check: Check,
    plant: Callable[[], None],
    place: tuple[object, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The original comes back at the end of the test.
    monkeypatch.setattr(*place, getattr(*place))
    plant()
    with pytest.raises(AssertionError):
        await check()


def test_every_bug_has_a_check() -> None:
    assert {plant for _, plant, _ in CHECKS} == set(scaling.BUGS)
