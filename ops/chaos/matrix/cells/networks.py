"""Cells with partitions and bad networks."""

import asyncio
import contextlib

from ops.chaos.matrix.cells.common import (
    PARTITION_S,
    WORKER_S,
    dropping,
    new_id,
    port_of,
    timed,
    wait_for_load,
)
from ops.chaos.matrix.deployment import Deployment, Disturb
from ops.chaos.processes import network
from ops.chaos.processes.pool import LOAD
from ops.chaos.processes.proxy import Behavior, Proxy
from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.protocol.records import Failure, Finish
from shared.protocol.sampling import SamplingParams


def bad_network(role: str) -> Disturb:
    """Lose 30 % of the packets, delay them by 200 ms, then end connections in three ways."""

    async def disturb(deployment: Deployment) -> None:
        await wait_for_load(deployment)
        slot = deployment.pick(role)
        proxy = deployment.proxies[slot]
        with _outage_of_clients(deployment, role):
            with dropping([proxy.port], probability=0.3):
                await asyncio.sleep(5.0)
                deployment.outcome.figures["packets_lost"] = network.num_dropped()
            await proxy.set(Behavior(delay_s=0.1), Behavior(delay_s=0.1))
            await asyncio.sleep(2.0)
            await proxy.set()
            proxy.cut_after(deployment.rng.randrange(1, 400))
            await asyncio.sleep(2.0)
            proxy.half_open()
            await asyncio.sleep(2.0)
            proxy.cut()
            await asyncio.sleep(2.0)
        await deployment.probe("after_network", PARTITION_S)

    return disturb


def blackholed(role: str, *, up: bool = True, down: bool = True, lasts_s: float = 10.0) -> Disturb:
    async def disturb(deployment: Deployment) -> None:
        await wait_for_load(deployment)
        slot = deployment.pick(role)
        proxy = deployment.proxies[slot]
        with _outage_of_clients(deployment, role):
            await proxy.blackhole(up=up, down=down)
            await deployment.probe("beside_partition", WORKER_S)
            await asyncio.sleep(lasts_s)
            await proxy.heal()
        await deployment.probe("after_partition", PARTITION_S)

    return disturb


def _outage_of_clients(
    deployment: Deployment, role: str
) -> contextlib.AbstractContextManager[None]:
    """Return an outage for faults that delay the requests themselves."""
    if role in (LOAD, "gateway"):
        return deployment.outage("client")
    return contextlib.nullcontext()


async def one_way(deployment: Deployment) -> None:
    """Hold what an engine sends, and later what it receives."""
    await blackholed("engine", down=False, lasts_s=7.0)(deployment)
    await blackholed("engine", up=False, lasts_s=7.0)(deployment)


async def all_workers_blackholed(deployment: Deployment) -> None:
    """Cut off one worker of each role, at the same time."""
    await wait_for_load(deployment)
    slots = [slot for slot in deployment.pool.slots if slot.role != LOAD and slot.number == 0]
    for slot in slots:
        await deployment.proxies[slot].blackhole()
    await deployment.probe("beside_partition", WORKER_S)
    await asyncio.sleep(10.0)
    for slot in slots:
        await deployment.proxies[slot].heal()
    await deployment.probe("after_partition", PARTITION_S)


async def flapping(deployment: Deployment, rounds: int = 10) -> None:
    """Cut one engine and the clients off every other second."""
    await wait_for_load(deployment)
    proxies = [
        deployment.proxies[deployment.pick("engine")],
        deployment.proxies[deployment.slot(LOAD)],
    ]
    with deployment.outage("flap"):
        for _ in range(rounds):
            for proxy in proxies:
                await proxy.blackhole()
            await asyncio.sleep(1.0)
            for proxy in proxies:
                await proxy.heal()
            await asyncio.sleep(1.0)
    await deployment.probe("after_flapping", PARTITION_S)


async def healed_after_the_deadline(deployment: Deployment) -> None:
    """Cut both engines off with requests in flight, until after the deadlines."""
    await wait_for_load(deployment)
    engines = [deployment.proxies[slot] for slot in deployment.pool.slots if slot.role == "engine"]
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    async with deployment.bus("late") as bus:
        ids = [new_id(f"silent-{n}") for n in range(6)]
        asked = [
            asyncio.create_task(timed(deployment.ask(bus, id, sampling, timeout_s=3.0)))
            for id in ids
        ]
        await asyncio.sleep(1.0)
        with deployment.outage("engines-silent"):
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
                deployment.note(f"I4: {id} was written to after its end")
    for records, took_s in ends:
        end = records[-1]
        code = end.error.code if isinstance(end, Failure) else "finish"
        if code != "deadline_exceeded" or took_s > 5.0:
            deployment.note(f"I1: a deadline of 3 s ended with {code} after {took_s:.2f} s")
    deployment.outcome.figures["deadline_s"] = max(took_s for _, took_s in ends)
    await deployment.probe("after_partition", PARTITION_S)


async def reader_that_stops(deployment: Deployment) -> None:
    """Stop a reader of all token logs for 8 s, which must not affect others."""
    await wait_for_load(deployment)
    proxy = Proxy(port_of(deployment.url))
    await proxy.start()
    slow = await Bus.connect(proxy.url, "slow-reader")
    try:
        await slow.subscribe("pm.tokens.*")
        id = new_id("slow")
        reading = asyncio.create_task(
            deployment.ask(slow, id, SamplingParams(max_tokens=300, ignore_eos=True))
        )
        await asyncio.sleep(0.5)
        await proxy.blackhole(up=False)
        await asyncio.sleep(8.0)
        await proxy.heal()
        async with asyncio.timeout(20):
            records = await reading
        indexes = [record.index for record in records]
        if indexes != list(range(len(records))) or not isinstance(records[-1], Finish):
            deployment.note("I2: a reader that had stopped did not get its complete stream")
    finally:
        await slow.close()
        await proxy.stop()
