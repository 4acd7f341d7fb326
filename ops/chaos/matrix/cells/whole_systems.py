"""Cells in which the embedded broker of `pagemill up` fails, and nothing is repaired by hand."""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from nats.errors import Error as NatsError

from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.whole_system import HTTP_S, WholeSystem, queues
from ops.chaos.plain_client import PAUSE_S, PlainClient

SERVED_S = 20.0
# A full disk is found by a probe every 2 s, and a restart ends all connections.
REPAIRED_S = 60.0
FULL_S = 6.0
EXIT_S = 60.0
FREE_PORTS = {"PAGEMILL_NATS__PORT": "0", "PAGEMILL_GATEWAY__PORT": "0"}
# Typed refusals of the gateway while the broker stores nothing.
REFUSALS = (503, 504, 507)

Condition = Callable[[], Coroutine[Any, Any, bool]]


@cell(
    "up: disk fills and empties",
    "another program fills a disk of 96 MiB for 6 s",
    f"{REPAIRED_S:.0f} s",
    on="up, small disk",
    load_s=15,
)
async def disk_fills(system: WholeSystem) -> None:
    """Fill the disk to its last byte, wait for refusals, and remove the file."""
    await asyncio.sleep(2.0)
    ballast = system.store / "ballast"
    await asyncio.to_thread(_fill, str(ballast))
    await system.wait_for("refused_after_s", _refuses(system), HTTP_S)
    await system.wait_for("not_ready_after_s", _is_not_ready(system), HTTP_S)
    await asyncio.sleep(FULL_S)
    await asyncio.to_thread(ballast.unlink)
    await system.wait_for("ready_after_s", system.is_ready, REPAIRED_S)
    await system.probe("after_space", SERVED_S)


def _fill(file: str) -> None:
    with open(file, "wb", buffering=0) as ballast:
        for size in (2**20, 4096, 1):
            try:
                while ballast.write(bytes(size)):
                    pass
            except OSError:
                continue


def _refuses(system: WholeSystem) -> Condition:
    async def refuses() -> bool:
        reply = await system.chat()
        return reply is not None and reply.status in REFUSALS

    return refuses


def _is_not_ready(system: WholeSystem) -> Condition:
    async def is_not_ready() -> bool:
        return not await system.is_ready()

    return is_not_ready


@cell(
    "up: descriptors end",
    "the broker may open no further file",
    f"{REPAIRED_S:.0f} s",
    on="up",
    load_s=20,
)
async def descriptors_end(system: WholeSystem) -> None:
    """Lower the broker's limit on descriptors below the ones that it has. A restart raises it."""
    await asyncio.sleep(2.0)
    operator = await system.connect_operator()
    number, pid = 0, system.broker_pid
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))

    async def has_new_broker() -> bool:
        nonlocal number
        number += 1
        # Each new file of a stream needs a descriptor.
        with contextlib.suppress(NatsError):
            await operator.nc.publish(f"pm.media.{number:064}", os.urandom(2**20))
        return system.broker_pid != pid

    await system.wait_for("restarted_after_s", has_new_broker, REPAIRED_S)
    await operator.close()
    await system.wait_for("ready_after_s", system.is_ready, REPAIRED_S)
    await system.probe("after_restart", SERVED_S)


_deletion = partial(cell, how="of all queues, by the operator", bound="20 s", on="up", load_s=15)


@_deletion("up: consumers deleted", whole=False)
@_deletion("up: streams deleted", whole=True)
async def queues_deleted(system: WholeSystem, *, whole: bool) -> None:
    """Delete the consumers of all work queues, or these streams, under load."""
    await asyncio.sleep(2.0)
    operator = await system.connect_operator()
    names = [stream["config"]["name"] for stream in await queues(operator)]
    before = {name: await _consumers(operator, name) for name in names}
    for name in names:
        if whole:
            await operator.call(f"$JS.API.STREAM.DELETE.{name}")
        for consumer in [] if whole else before[name]:
            await operator.call(f"$JS.API.CONSUMER.DELETE.{name}.{consumer}")
    await system.probe("after_deletion", SERVED_S)

    async def are_back() -> bool:
        return {name: await _consumers(operator, name) for name in names} == before

    await system.wait_for("back_after_s", are_back, SERVED_S)
    await operator.close()


async def _consumers(operator: PlainClient, stream: str) -> list[str]:
    reply = await operator.call(f"$JS.API.CONSUMER.NAMES.{stream}")
    return sorted(reply.get("consumers") or [])


@cell(
    "up: two brokers on one store",
    "a second `pagemill up` with other ports, also after kill -9 of the broker",
    "refused",
    on="up",
    load_s=20,
)
async def two_brokers(system: WholeSystem) -> None:
    """Start the command again in the same folder, and once more while the broker is restarted."""
    for turn in range(2):
        if turn:
            os.kill(system.broker_pid, signal.SIGKILL)
        name = f"second-{turn}"
        second = system.start_up(name, **FREE_PORTS)
        try:
            code = await asyncio.to_thread(second.wait, EXIT_S)
        finally:
            second.kill()
        said = (system.folder / f"{name}.err").read_text()
        if code != 1 or "store_in_use" not in said:
            system.note(f"a second `pagemill up` ended with {code}: {said[-500:]}")
        await system.probe("meanwhile", SERVED_S)
        await asyncio.sleep(PAUSE_S)
