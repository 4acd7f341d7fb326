"""Cells in which members of a cluster of three fail."""

import asyncio
import signal
from functools import partial
from pathlib import Path

from ops.chaos.history import ProcessExited, read_events
from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.cells.common import LEADER_S, PARTITION_S, fill, one_of_each, wait_for_load
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.plan import MODEL
from ops.chaos.processes import network
from ops.chaos.processes.brokers import ThreeBrokers
from shared.protocol import subjects

# Longer than a worker needs to connect and to ask for the streams.
STARTING_S = 8.0
_cell = partial(cell, on="cluster", load_s=20.0)
_cell_of_slots = partial(cell, on="slots", load_s=20.0)


def _brokers(deployment: Deployment) -> ThreeBrokers:
    assert isinstance(deployment.brokers, ThreeBrokers)
    return deployment.brokers


async def _leader(deployment: Deployment, stream: str = subjects.REQUESTS_STREAM) -> int:
    cluster = _brokers(deployment).cluster
    while (number := await cluster.leader_of(stream)) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return number


async def _follower(deployment: Deployment) -> int:
    leader = await _leader(deployment)
    return (leader + deployment.rng.choice([1, 2])) % 3


@_cell("cluster: kill leader", "kill -9, twice", "10 s", leader=True)
@_cell("cluster: kill follower", "kill -9, twice", "10 s", leader=False)
@_cell_of_slots("slots: kill leader", "kill -9, twice", "10 s", leader=True)
async def member_killed(deployment: Deployment, *, leader: bool, times: int = 2) -> None:
    cluster = _brokers(deployment).cluster
    for _ in range(times):
        await wait_for_load(deployment)
        number = await (_leader(deployment) if leader else _follower(deployment))
        with deployment.outage("kill-member"):
            cluster.kill(number)
            await deployment.probe("after_leader" if leader else "after_follower", LEADER_S)
        await cluster.wait_current()


@_cell("cluster: kill 2 of 3", "kill -9, down for 6 s", "10 s", count=2)
@_cell("cluster: kill all 3", "kill -9, down for 6 s", "10 s", count=3)
async def members_down(deployment: Deployment, count: int, lasts_s: float = 6.0) -> None:
    """Kill members. Requests are refused without a majority, and served again with one."""
    brokers = _brokers(deployment)
    await wait_for_load(deployment)
    first = await _leader(deployment)
    numbers = [(first + turn) % 3 for turn in range(count)]
    with deployment.outage("no-majority"):
        brokers.held = True
        for number in numbers:
            brokers.cluster.kill(number)
        await asyncio.sleep(lasts_s)
        brokers.held = False
        took_s = await brokers.cluster.wait_current()
        deployment.outcome.figures["current_after_s"] = took_s
    await deployment.probe("after_majority", LEADER_S)


@_cell(
    "cluster: start during an election",
    "two of three members down, one worker of each role replaced",
    "10 s",
)
async def started_in_an_election(deployment: Deployment) -> None:
    """Start workers that reach only a server without a leader. They wait until there is one."""
    brokers = _brokers(deployment)
    await wait_for_load(deployment)
    leader = await _leader(deployment)
    slots = one_of_each(deployment)
    old = {slot: slot.pid for slot in slots}
    with deployment.outage("no-majority"):
        brokers.held = True
        for number in (leader, (leader + 1) % 3):
            brokers.cluster.kill(number)
        for slot in slots:
            deployment.signal(slot, "replace", signal.SIGKILL)
        await asyncio.sleep(STARTING_S)
        started = {slot.pid for slot in slots} - set(old.values())
        brokers.held = False
        await brokers.cluster.wait_current()
    for slot, pid in old.items():
        await deployment.replaced(slot, pid)
    deployment.outcome.figures["started"] = len(started)
    events = read_events(deployment.folder / "pool.jsonl")
    for event in events:
        if isinstance(event, ProcessExited) and event.pid in started:
            deployment.note(f"{event.role}: ended with {event.code} instead of waiting")
    await deployment.probe("after_election", LEADER_S)


@_cell(
    "cluster: SIGSTOP leader",
    "kill -STOP, 15 s",
    "10 s",
    limit="a frozen server is missed after 6 s, and a new leader elected 4 to 9 s after that",
)
async def leader_stopped(deployment: Deployment) -> None:
    cluster = _brokers(deployment).cluster
    await wait_for_load(deployment)
    number = await _leader(deployment)
    with deployment.outage("stop"):
        cluster.pause(number)
        try:
            await deployment.probe("beside_stopped", LEADER_S)
            await asyncio.sleep(15.0)
        finally:
            cluster.resume(number)
        await cluster.wait_current()
    await deployment.probe("after_stop", LEADER_S)


@_cell(
    "cluster: leader isolated",
    "iptables by cgroup, 12 s",
    "10 s",
    needs=network.why_unavailable,
    leader=True,
)
@_cell(
    "partition: minority of brokers",
    "iptables by cgroup, 12 s",
    "10 s",
    needs=network.why_unavailable,
    limit="a client of the server that is cut off sees nothing new until it is back",
    leader=False,
)
async def member_isolated(deployment: Deployment, *, leader: bool) -> None:
    """Cut a member off from the other members, while workers and clients still reach it."""
    cluster = _brokers(deployment).cluster
    await wait_for_load(deployment)
    number = await (_leader(deployment) if leader else _follower(deployment))
    with deployment.outage("isolated"):
        with network.dropping(cluster.route_ports, group=cluster.group(number)):
            # Its clients are isolated as well, until they connect to another member.
            await asyncio.sleep(12.0)
        await cluster.wait_current()
    await deployment.probe("after_isolation", LEADER_S)


@_cell(
    "cluster: clients cut from the leader",
    "iptables by port, 11 s",
    "10 s",
    needs=network.why_unavailable,
)
async def clients_cut_from_the_leader(deployment: Deployment) -> None:
    cluster = _brokers(deployment).cluster
    await wait_for_load(deployment)
    number = await _leader(deployment)
    with deployment.outage("cut-from-leader"), network.dropping([cluster.members[number].port]):
        await asyncio.sleep(PARTITION_S)
        await deployment.probe("beside_cut", LEADER_S)
        await asyncio.sleep(4.0)
    await deployment.probe("after_cut", LEADER_S)


@_cell_of_slots("slots: all queues change leaders", "step down, five times", "10 s")
async def leaders_of_queues_change(deployment: Deployment) -> None:
    """Have the consumers of all slots elect other leaders, which do not have earlier pulls."""
    queues = [queue for lane in subjects.LANES for queue in _engine_queues(deployment, lane)]
    await wait_for_load(deployment)
    for _ in range(5):
        await _brokers(deployment).cluster.change_leaders(subjects.STAGES_STREAM, queues)
        await deployment.probe("after_change", LEADER_S)


def _engine_queues(deployment: Deployment, lane: str) -> list[str]:
    slots = [None, *range(deployment.settings.slots)]
    return [subjects.stage_consumer("engine", MODEL, lane, slot) for slot in slots]


@_cell("cluster: rolling restart", "SIGTERM, one by one", "10 s")
async def rolling_members(deployment: Deployment) -> None:
    brokers = _brokers(deployment)
    await wait_for_load(deployment)
    brokers.held = True
    try:
        for number in range(3):
            with deployment.outage("rolling"):
                await brokers.cluster.terminate(number)
                await brokers.cluster.restart(number)
                await brokers.cluster.wait_current()
    finally:
        brokers.held = False
    await deployment.probe("after_rolling", LEADER_S)


@_cell("cluster: leader's disk full", "tmpfs of 256 MiB", "10 s")
async def leader_disk_full(deployment: Deployment) -> None:
    """Fill the disk of the leader; every member has a separate small disk."""
    brokers = _brokers(deployment)
    await wait_for_load(deployment)
    number = await _leader(deployment)
    member = brokers.cluster.members[number]
    with deployment.outage("enospc"):
        ballast = await asyncio.to_thread(fill, member.store_dir)
        await asyncio.sleep(10.0)
        deployment.outcome.figures["leader_moved"] = float(await _leader(deployment) != number)
        ballast.unlink()
        pid = brokers.cluster.pid(number)
        brokers.cluster.kill(number)
        while brokers.cluster.pid(number) == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await brokers.cluster.wait_current()
    await deployment.probe("after_space", LEADER_S)


@_cell(
    "cluster: follower corrupted",
    "one bit of its .blk files, then fail over",
    "detected",
    limit="a documented limit of nats-server (Jepsen, issue 7549)",
)
async def follower_corrupted(deployment: Deployment) -> None:
    """Flip bits in a follower's store while it is down; then kill the leader."""
    brokers = _brokers(deployment)
    cluster = brokers.cluster
    await wait_for_load(deployment)
    leader, number = await _leader(deployment, subjects.TOKENS_STREAM), await _follower(deployment)
    if number == leader:
        number = (number + 1) % 3
    with deployment.outage("corrupt"):
        brokers.held = True
        cluster.kill(number)
        flipped = await asyncio.to_thread(
            _flip_a_byte, cluster.members[number].store_dir, deployment
        )
        brokers.held = False
        deployment.outcome.figures["bytes_flipped"] = flipped
        await cluster.wait_current()
        cluster.kill(leader)
        await cluster.wait_current()
    await deployment.probe("after_corruption", LEADER_S)


def _flip_a_byte(store: Path, deployment: Deployment) -> int:
    blocks = [file for file in store.rglob("TOKENS/msgs/*.blk") if file.stat().st_size > 100]
    for file in blocks:
        at = deployment.rng.randrange(file.stat().st_size)
        with file.open("r+b") as block:
            block.seek(at)
            byte = block.read(1)[0]
            block.seek(at)
            block.write(bytes([byte ^ 0x10]))
    return len(blocks)
