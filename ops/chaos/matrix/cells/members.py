"""Cells in which members of a cluster of three are harmed."""

import asyncio
from pathlib import Path

from ops.chaos.matrix.cells.common import LEADER_S, PARTITION_S, dropping, fill, lead_in
from ops.chaos.matrix.scene import Disturb, Scene, ThreeServers
from shared.protocol import subjects


def _cluster(scene: Scene) -> ThreeServers:
    assert isinstance(scene.servers, ThreeServers)
    return scene.servers


async def _leader(scene: Scene, stream: str = subjects.REQUESTS_STREAM) -> int:
    cluster = _cluster(scene).cluster
    while (number := await cluster.leader_of(stream)) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return number


async def _follower(scene: Scene) -> int:
    leader = await _leader(scene)
    return (leader + scene.rng.choice([1, 2])) % 3


def member_killed(*, leader: bool, times: int = 2) -> Disturb:
    async def disturb(scene: Scene) -> None:
        cluster = _cluster(scene).cluster
        for _ in range(times):
            await lead_in(scene)
            number = await (_leader(scene) if leader else _follower(scene))
            with scene.outage("kill-member"):
                cluster.kill(number)
                await scene.probe("after_leader" if leader else "after_follower", LEADER_S)
            await cluster.wait_current()

    return disturb


def members_down(count: int, lasts_s: float = 6.0) -> Disturb:
    """Without a majority nothing is taken, and whoever asks is told; with one all goes on."""

    async def disturb(scene: Scene) -> None:
        servers = _cluster(scene)
        await lead_in(scene)
        first = await _leader(scene)
        numbers = [(first + turn) % 3 for turn in range(count)]
        with scene.outage("no-majority"):
            servers.held = True
            for number in numbers:
                servers.cluster.kill(number)
            await asyncio.sleep(lasts_s)
            servers.held = False
            took_s = await servers.cluster.wait_current()
            scene.outcome.figures["current_after_s"] = took_s
        await scene.probe("after_majority", LEADER_S)

    return disturb


async def leader_stopped(scene: Scene) -> None:
    cluster = _cluster(scene).cluster
    await lead_in(scene)
    number = await _leader(scene)
    with scene.outage("stop"):
        cluster.pause(number)
        try:
            await scene.probe("beside_stopped", LEADER_S)
            await asyncio.sleep(15.0)
        finally:
            cluster.resume(number)
        await cluster.wait_current()
    await scene.probe("after_stop", LEADER_S)


def member_isolated(*, leader: bool) -> Disturb:
    """Cut off from the other members; workers and clients still reach it."""

    async def disturb(scene: Scene) -> None:
        cluster = _cluster(scene).cluster
        await lead_in(scene)
        number = await (_leader(scene) if leader else _follower(scene))
        with scene.outage("isolated"):
            with dropping(cluster.route_ports, group=cluster.group(number)):
                # Who is connected to the isolated one is as isolated, until it finds another.
                await asyncio.sleep(12.0)
            await cluster.wait_current()
        await scene.probe("after_isolation", LEADER_S)

    return disturb


async def clients_cut_from_the_leader(scene: Scene) -> None:
    cluster = _cluster(scene).cluster
    await lead_in(scene)
    number = await _leader(scene)
    with scene.outage("cut-from-leader"), dropping([cluster.members[number].port]):
        await asyncio.sleep(PARTITION_S)
        await scene.probe("beside_cut", LEADER_S)
        await asyncio.sleep(4.0)
    await scene.probe("after_cut", LEADER_S)


async def rolling_members(scene: Scene) -> None:
    servers = _cluster(scene)
    await lead_in(scene)
    servers.held = True
    try:
        for number in range(3):
            with scene.outage("rolling"):
                await servers.cluster.terminate(number)
                await servers.cluster.restart(number)
                await servers.cluster.wait_current()
    finally:
        servers.held = False
    await scene.probe("after_rolling", LEADER_S)


async def leader_disk_full(scene: Scene) -> None:
    """The scene gives every member a small disk of its own."""
    servers = _cluster(scene)
    await lead_in(scene)
    number = await _leader(scene)
    member = servers.cluster.members[number]
    with scene.outage("enospc"):
        ballast = await asyncio.to_thread(fill, member.store_dir)
        await asyncio.sleep(10.0)
        scene.outcome.figures["leader_moved"] = float(await _leader(scene) != number)
        ballast.unlink()
        pid = servers.cluster.pid(number)
        servers.cluster.kill(number)
        while servers.cluster.pid(number) == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await servers.cluster.wait_current()
    await scene.probe("after_space", LEADER_S)


async def follower_corrupted(scene: Scene) -> None:
    """One byte of one follower's store is flipped while it is down; then the others fail over."""
    servers = _cluster(scene)
    cluster = servers.cluster
    await lead_in(scene)
    leader, number = await _leader(scene, subjects.TOKENS_STREAM), await _follower(scene)
    if number == leader:
        number = (number + 1) % 3
    with scene.outage("corrupt"):
        servers.held = True
        cluster.kill(number)
        flipped = await asyncio.to_thread(_flip_a_byte, cluster.members[number].store_dir, scene)
        servers.held = False
        scene.outcome.figures["bytes_flipped"] = flipped
        await cluster.wait_current()
        cluster.kill(leader)
        await cluster.wait_current()
    await scene.probe("after_corruption", LEADER_S)


def _flip_a_byte(store: Path, scene: Scene) -> int:
    blocks = [file for file in store.rglob("TOKENS/msgs/*.blk") if file.stat().st_size > 100]
    for file in blocks:
        at = scene.rng.randrange(file.stat().st_size)
        with file.open("r+b") as block:
            block.seek(at)
            byte = block.read(1)[0]
            block.seek(at)
            block.write(bytes([byte ^ 0x10]))
    return len(blocks)
