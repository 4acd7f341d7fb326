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
from ops.chaos.matrix.whole_system import HTTP_S, Reply, WholeSystem, queues
from ops.chaos.plain_client import PAUSE_S, PlainClient

SERVED_S = 20.0
# A full disk is found by a probe every 2 s, and a restart ends all connections.
REPAIRED_S = 60.0
FULL_S = 6.0
# An accepted request waits while nothing is stored, so it must not delay the next one.
ASKED_EACH_S = 2.0
LONGEST_S = 180.0
EXIT_S = 60.0
FREE_PORTS = {"PAGEMILL_NATS__PORT": "0", "PAGEMILL_GATEWAY__PORT": "0"}
# Errors of the gateway while the broker stores nothing.
MAY_PASS = (503, 504, 507)

Condition = Callable[[], Coroutine[Any, Any, bool]]


@cell(
    "up: disk fills and empties",
    "another program fills a disk of 96 MiB for 6 s",
    f"{REPAIRED_S:.0f} s",
    on="up, small disk",
    load_s=15,
)
async def disk_fills(system: WholeSystem) -> None:
    """Fill the disk to its last byte, ask until a request is refused, and remove the file.

    The disk fills between two measurements, so the first requests may be accepted. They end when
    the disk has room again.
    """
    await asyncio.sleep(2.0)
    ballast = system.store / "ballast"
    await asyncio.to_thread(_fill, str(ballast))
    chats: list[asyncio.Task[Reply | None]] = []
    await system.wait_for("refused_after_s", partial(_is_refused, system, chats), HTTP_S)
    await system.wait_for("not_ready_after_s", _is_not_ready(system), HTTP_S)
    await asyncio.sleep(FULL_S)
    await asyncio.to_thread(ballast.unlink)
    await system.wait_for("ready_after_s", system.is_ready, REPAIRED_S)
    await system.probe("after_space", SERVED_S)
    await system.wait_for("accepted_ended_after_s", partial(_have_ended, chats), REPAIRED_S)
    for chat in chats:
        _check_end(system, await chat)


def _fill(file: str) -> None:
    with open(file, "wb", buffering=0) as ballast:
        for size in (2**20, 4096, 1):
            try:
                while ballast.write(bytes(size)):
                    pass
            except OSError:
                continue


async def _is_refused(system: WholeSystem, chats: list[asyncio.Task[Reply | None]]) -> bool:
    """Ask once more, and return whether a chat was refused with the numbers of the disk."""
    chats.append(asyncio.create_task(system.chat(timeout_s=LONGEST_S)))
    await asyncio.wait(chats[-1:], timeout=ASKED_EACH_S)
    replies = [chat.result() for chat in chats if chat.done()]
    min_free_bytes = str(system.limits.min_free_mib * 2**20)
    return any(r and r.error_code == "disk_full" and min_free_bytes in r.body for r in replies)


def _have_ended(chats: list[asyncio.Task[Reply | None]]) -> bool:
    return all(chat.done() for chat in chats)


def _check_end(system: WholeSystem, reply: Reply | None) -> None:
    """Note a violation if a chat ended without an answer and without an error that may pass."""
    if reply is None:
        system.note("a chat during the full disk has no reply")
    elif reply.status != 200 and not (reply.status in MAY_PASS and reply.error_code):
        system.note(f"a chat during the full disk ended with {reply.status} {reply.body}")


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
