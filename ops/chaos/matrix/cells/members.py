"""Cells in which members of a cluster of three fail."""

import asyncio
from pathlib import Path

from ops.chaos.matrix.cells.common import LEADER_S, PARTITION_S, dropping, fill, wait_for_load
from ops.chaos.matrix.deployment import Deployment, Disturb
from ops.chaos.matrix.servers import ThreeServers
from ops.chaos.plan import MODEL
from shared.protocol import subjects


def _cluster(deployment: Deployment) -> ThreeServers:
    assert isinstance(deployment.servers, ThreeServers)
    return deployment.servers


async def _leader(deployment: Deployment, stream: str = subjects.REQUESTS_STREAM) -> int:
    cluster = _cluster(deployment).cluster
    while (number := await cluster.leader_of(stream)) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return number


async def _follower(deployment: Deployment) -> int:
    leader = await _leader(deployment)
    return (leader + deployment.rng.choice([1, 2])) % 3


def member_killed(*, leader: bool, times: int = 2) -> Disturb:
    async def disturb(deployment: Deployment) -> None:
        cluster = _cluster(deployment).cluster
        for _ in range(times):
            await wait_for_load(deployment)
            number = await (_leader(deployment) if leader else _follower(deployment))
            with deployment.outage("kill-member"):
                cluster.kill(number)
                await deployment.probe("after_leader" if leader else "after_follower", LEADER_S)
            await cluster.wait_current()

    return disturb


def members_down(count: int, lasts_s: float = 6.0) -> Disturb:
    """Kill members: without a majority requests are refused, with one they are served again."""

    async def disturb(deployment: Deployment) -> None:
        servers = _cluster(deployment)
        await wait_for_load(deployment)
        first = await _leader(deployment)
        numbers = [(first + turn) % 3 for turn in range(count)]
        with deployment.outage("no-majority"):
            servers.held = True
            for number in numbers:
                servers.cluster.kill(number)
            await asyncio.sleep(lasts_s)
            servers.held = False
            took_s = await servers.cluster.wait_current()
            deployment.outcome.figures["current_after_s"] = took_s
        await deployment.probe("after_majority", LEADER_S)

    return disturb


async def leader_stopped(deployment: Deployment) -> None:
    cluster = _cluster(deployment).cluster
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


def member_isolated(*, leader: bool) -> Disturb:
    """Cut a member off from the other members, while workers and clients still reach it."""

    async def disturb(deployment: Deployment) -> None:
        cluster = _cluster(deployment).cluster
        await wait_for_load(deployment)
        number = await (_leader(deployment) if leader else _follower(deployment))
        with deployment.outage("isolated"):
            with dropping(cluster.route_ports, group=cluster.group(number)):
                # Its clients are isolated as well, until they connect to another member.
                await asyncio.sleep(12.0)
            await cluster.wait_current()
        await deployment.probe("after_isolation", LEADER_S)

    return disturb


async def clients_cut_from_the_leader(deployment: Deployment) -> None:
    cluster = _cluster(deployment).cluster
    await wait_for_load(deployment)
    number = await _leader(deployment)
    with deployment.outage("cut-from-leader"), dropping([cluster.members[number].port]):
        await asyncio.sleep(PARTITION_S)
        await deployment.probe("beside_cut", LEADER_S)
        await asyncio.sleep(4.0)
    await deployment.probe("after_cut", LEADER_S)


async def leaders_of_queues_change(deployment: Deployment) -> None:
    """Have the consumers of all slots elect other leaders, which know no pull of before."""
    queues = [queue for lane in subjects.LANES for queue in _engine_queues(deployment, lane)]
    await wait_for_load(deployment)
    for _ in range(5):
        await _cluster(deployment).cluster.change_leaders(subjects.STAGES_STREAM, queues)
        await deployment.probe("after_change", LEADER_S)


def _engine_queues(deployment: Deployment, lane: str) -> list[str]:
    slots = [None, *range(deployment.settings.slots)]
    return [subjects.stage_consumer("engine", MODEL, lane, slot) for slot in slots]


async def rolling_members(deployment: Deployment) -> None:
    servers = _cluster(deployment)
    await wait_for_load(deployment)
    servers.held = True
    try:
        for number in range(3):
            with deployment.outage("rolling"):
                await servers.cluster.terminate(number)
                await servers.cluster.restart(number)
                await servers.cluster.wait_current()
    finally:
        servers.held = False
    await deployment.probe("after_rolling", LEADER_S)


async def leader_disk_full(deployment: Deployment) -> None:
    """Fill the disk of the leader; every member has a small disk of its own."""
    servers = _cluster(deployment)
    await wait_for_load(deployment)
    number = await _leader(deployment)
    member = servers.cluster.members[number]
    with deployment.outage("enospc"):
        ballast = await asyncio.to_thread(fill, member.store_dir)
        await asyncio.sleep(10.0)
        deployment.outcome.figures["leader_moved"] = float(await _leader(deployment) != number)
        ballast.unlink()
        pid = servers.cluster.pid(number)
        servers.cluster.kill(number)
        while servers.cluster.pid(number) == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await servers.cluster.wait_current()
    await deployment.probe("after_space", LEADER_S)


async def follower_corrupted(deployment: Deployment) -> None:
    """Flip bits in a follower's store while it is down; then kill the leader."""
    servers = _cluster(deployment)
    cluster = servers.cluster
    await wait_for_load(deployment)
    leader, number = await _leader(deployment, subjects.TOKENS_STREAM), await _follower(deployment)
    if number == leader:
        number = (number + 1) % 3
    with deployment.outage("corrupt"):
        servers.held = True
        cluster.kill(number)
        flipped = await asyncio.to_thread(
            _flip_a_byte, cluster.members[number].store_dir, deployment
        )
        servers.held = False
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
