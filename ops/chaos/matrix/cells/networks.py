"""Cells in which somebody is cut off, or can hardly be reached."""

import asyncio
import contextlib

from ops.chaos.matrix.cells.common import (
    PARTITION_S,
    WORKER_S,
    dropping,
    lead_in,
    new_id,
    port_of,
    timed,
)
from ops.chaos.matrix.scene import Disturb, Scene
from ops.chaos.processes import network
from ops.chaos.processes.pool import LOAD
from ops.chaos.processes.proxy import Proxy, Way
from shared.bus.bus import Bus
from shared.protocol.messages import Failure, Finish
from shared.protocol.sampling import SamplingParams
from shared.state.token_log import read_log


def bad_network(role: str) -> Disturb:
    """30 % of the packets lost; 200 ms of delay; then three ways in which a connection ends."""

    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        proxy = scene.proxies[slot]
        with _asking_is_late(scene, role):
            with dropping([proxy.port], probability=0.3):
                await asyncio.sleep(5.0)
                scene.outcome.figures["packets_lost"] = network.num_dropped()
            await proxy.set(Way(delay_s=0.1), Way(delay_s=0.1))
            await asyncio.sleep(2.0)
            await proxy.set()
            proxy.cut_after(scene.rng.randrange(1, 400))
            await asyncio.sleep(2.0)
            proxy.half_open()
            await asyncio.sleep(2.0)
            proxy.cut()
            await asyncio.sleep(2.0)
        await scene.probe("after_network", PARTITION_S)

    return disturb


def blackholed(role: str, *, up: bool = True, down: bool = True, lasts_s: float = 10.0) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        proxy = scene.proxies[slot]
        with _asking_is_late(scene, role):
            await proxy.blackhole(up=up, down=down)
            await scene.probe("beside_partition", WORKER_S)
            await asyncio.sleep(lasts_s)
            await proxy.heal()
        await scene.probe("after_partition", PARTITION_S)

    return disturb


def _asking_is_late(scene: Scene, role: str) -> contextlib.AbstractContextManager[None]:
    """What clients ask for reaches the broker when it can."""
    if role in (LOAD, "gateway"):
        return scene.outage("client")
    return contextlib.nullcontext()


async def one_way(scene: Scene) -> None:
    """First nothing comes from an engine, later nothing comes to it."""
    await blackholed("engine", down=False, lasts_s=7.0)(scene)
    await blackholed("engine", up=False, lasts_s=7.0)(scene)


async def all_workers_blackholed(scene: Scene) -> None:
    """Of each role one, at the same time."""
    await lead_in(scene)
    slots = [slot for slot in scene.pool.slots if slot.role != LOAD and slot.number == 0]
    for slot in slots:
        await scene.proxies[slot].blackhole()
    await scene.probe("beside_partition", WORKER_S)
    await asyncio.sleep(10.0)
    for slot in slots:
        await scene.proxies[slot].heal()
    await scene.probe("after_partition", PARTITION_S)


async def flapping(scene: Scene, rounds: int = 10) -> None:
    """A second there, a second not there: one engine and the clients."""
    await lead_in(scene)
    proxies = [scene.proxies[scene.pick("engine")], scene.proxies[scene.slot(LOAD)]]
    with scene.outage("flap"):
        for _ in range(rounds):
            for proxy in proxies:
                await proxy.blackhole()
            await asyncio.sleep(1.0)
            for proxy in proxies:
                await proxy.heal()
            await asyncio.sleep(1.0)
    await scene.probe("after_flapping", PARTITION_S)


async def healed_after_the_deadline(scene: Scene) -> None:
    """Both engines fall silent with requests in hand, and come back when their time is over."""
    await lead_in(scene)
    engines = [scene.proxies[slot] for slot in scene.pool.slots if slot.role == "engine"]
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    async with scene.bus("late") as bus:
        ids = [new_id(f"silent-{n}") for n in range(6)]
        asked = [
            asyncio.create_task(timed(scene.ask(bus, id, sampling, timeout_s=3.0))) for id in ids
        ]
        await asyncio.sleep(1.0)
        with scene.outage("engines-silent"):
            for proxy in engines:
                await proxy.blackhole()
            ends = await asyncio.gather(*asked)
            await asyncio.sleep(2.0)
            before = [await read_log(bus, id) for id in ids]
            for proxy in engines:
                await proxy.heal()
        await asyncio.sleep(3.0)
        for id, log in zip(ids, before, strict=True):
            if await read_log(bus, id) != log:
                scene.note(f"I4: {id} was written to after its end")
    for records, took_s in ends:
        end = records[-1]
        code = end.error.code if isinstance(end, Failure) else "finish"
        if code != "deadline_exceeded" or took_s > 5.0:
            scene.note(f"I1: a deadline of 3 s ended with {code} after {took_s:.2f} s")
    scene.outcome.figures["deadline_s"] = max(took_s for _, took_s in ends)
    await scene.probe("after_partition", PARTITION_S)


async def reader_that_stops(scene: Scene) -> None:
    """A reader of all token logs stops reading for 8 s; nobody else is to notice."""
    await lead_in(scene)
    proxy = Proxy(port_of(scene.url))
    await proxy.start()
    slow = await Bus.connect(proxy.url, "slow-reader")
    try:
        await slow.subscribe("pm.tokens.*")
        id = new_id("slow")
        reading = asyncio.create_task(
            scene.ask(slow, id, SamplingParams(max_tokens=300, ignore_eos=True))
        )
        await asyncio.sleep(0.5)
        await proxy.blackhole(up=False)
        await asyncio.sleep(8.0)
        await proxy.heal()
        async with asyncio.timeout(20):
            records = await reading
        indexes = [record.index for record in records]
        if indexes != list(range(len(records))) or not isinstance(records[-1], Finish):
            scene.note("I2: a reader that had stopped did not get its stream whole")
    finally:
        await slow.close()
        await proxy.stop()
