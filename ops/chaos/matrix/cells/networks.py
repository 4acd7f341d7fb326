"""Cells with partitions and bad networks."""

import asyncio
import contextlib

from ops.chaos.matrix.cell import cell, cell_of_each_role
from ops.chaos.matrix.cells.common import (
    PARTITION_S,
    WORKER_S,
    new_id,
    one_of_each,
    port_of,
    timed,
    wait_for_load,
)
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.processes import network
from ops.chaos.processes.pool import LOAD
from ops.chaos.processes.proxy import Behavior, Proxy
from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.protocol.records import Failure, Finish
from shared.protocol.sampling import SamplingParams


@cell_of_each_role(
    "bad network",
    "packet loss 30 % (iptables), 200 ms delay, cut mid-frame, half-open, reset (proxy)",
    "7 s",
    needs=network.why_unavailable,
    load_s=14,
)
async def bad_network(deployment: Deployment, role: str) -> None:
    """Drop 30 % of the packets, delay bytes by 200 ms, then end connections in three ways."""
    await wait_for_load(deployment)
    slot = deployment.pick(role)
    proxy = deployment.proxies[slot]
    with _outage_of_clients(deployment, role):
        with network.dropping([proxy.port], probability=0.3):
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


@cell("partition: client from broker", "proxy holds, 10 s", "7 s", load_s=14, role=LOAD)
@cell(
    "partition: gateway from broker",
    "proxy holds, 10 s",
    "7 s",
    on="gateways",
    load_s=14,
    role="gateway",
)
async def blackholed(
    deployment: Deployment, role: str, *, up: bool = True, down: bool = True, lasts_s: float = 10.0
) -> None:
    await wait_for_load(deployment)
    slot = deployment.pick(role)
    proxy = deployment.proxies[slot]
    with _outage_of_clients(deployment, role):
        await proxy.blackhole(up=up, down=down)
        await deployment.probe("beside_partition", WORKER_S)
        await asyncio.sleep(lasts_s)
        await proxy.heal()
    await deployment.probe("after_partition", PARTITION_S)


def _outage_of_clients(
    deployment: Deployment, role: str
) -> contextlib.AbstractContextManager[None]:
    """Return an outage if a fault of this role delays the requests themselves."""
    if role in (LOAD, "gateway"):
        return deployment.outage("client")
    return contextlib.nullcontext()


@cell("partition: one way", "proxy holds one direction", "7 s", load_s=20)
async def one_way(deployment: Deployment) -> None:
    """Hold the bytes that an engine sends, and later the bytes that it receives."""
    await blackholed(deployment, "engine", down=False, lasts_s=7.0)
    await blackholed(deployment, "engine", up=False, lasts_s=7.0)


@cell("partition: worker from broker", "proxy holds, one of each role, 10 s", "7 s", load_s=14)
async def all_workers_blackholed(deployment: Deployment) -> None:
    """Cut off one worker of each role, at the same time."""
    await wait_for_load(deployment)
    slots = one_of_each(deployment)
    for slot in slots:
        await deployment.proxies[slot].blackhole()
    await deployment.probe("beside_partition", WORKER_S)
    await asyncio.sleep(10.0)
    for slot in slots:
        await deployment.proxies[slot].heal()
    await deployment.probe("after_partition", PARTITION_S)


@cell("partition: flapping", "proxy, 1 s on, 1 s off, 20 s", "7 s", load_s=22)
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


@cell(
    "partition: healed after the deadline",
    "proxy holds both engines",
    "deadline + 2 s",
    load_s=8,
)
async def healed_after_the_deadline(deployment: Deployment) -> None:
    """Cut both engines off with requests in flight, until after the deadlines."""
    await wait_for_load(deployment)
    engines = [deployment.proxies[slot] for slot in deployment.slots_of("engine")]
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    async with deployment.bus("late") as bus:
        ids = [new_id(f"silent-{n}") for n in range(6)]
        tasks = [
            asyncio.create_task(timed(deployment.ask(bus, id, sampling, timeout_s=3.0)))
            for id in ids
        ]
        await asyncio.sleep(1.0)
        with deployment.outage("engines-silent"):
            for proxy in engines:
                await proxy.blackhole()
            ends = await asyncio.gather(*tasks)
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


@cell("slow: client stops reading", "proxy holds, 8 s", load_s=9)
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
