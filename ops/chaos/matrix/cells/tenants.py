"""Cells in which one tenant attacks the others, with its key and the broker's protocol alone."""

import asyncio
import contextlib
import os
import signal
import time

from nats.errors import Error as NatsError

from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.whole_system import HOSTILE, QUESTIONS, TENANTS, WholeSystem, queues, size_of
from ops.chaos.plain_client import PAUSE_S, PlainClient, RawConnection, body_of, random_id

SERVED_S = 20.0
REFUSED_S = 5.0
NUM_CONNECTIONS = 3000
NUM_SUBSCRIPTIONS = 300_000
# A tenant's connections have 16 places, and each subscription that is accepted takes a kilobyte.
MAX_ACCEPTED = 16
MAX_GROWTH_MIB = 256.0
UNREAD_S = 15.0
# The broker has the pages for each connection in memory, up to its `max_pending`, until a write
# takes longer than 10 s.
MAX_UNREAD_MIB = 512.0 * (MAX_ACCEPTED - 1)


@cell(
    "tenants: one id for all",
    "a third tenant reserves, cancels and repeats each id; kill -9 of the engine",
    "own answers",
    on="up",
    load_s=15,
)
async def one_id(system: WholeSystem) -> None:
    """Use each id of the load before, during and after the requests of other tenants."""
    hostile = system.clients[HOSTILE]
    body = body_of(QUESTIONS[HOSTILE])
    for turn in range(3):
        for request_id in system.ids:
            header = {"Nats-Msg-Id": request_id}
            await hostile.publish(request_id, body, header)
            await hostile.cancel(request_id, header)
            await _forge(system, hostile, request_id)
        if turn == 0:
            for pid in system.workers("engine"):
                os.kill(pid, signal.SIGKILL)
    await system.probe("after_attack", SERVED_S)


async def _forge(system: WholeSystem, hostile: PlainClient, request_id: str) -> None:
    """Publish to subjects of other tenants, which the broker refuses."""
    forged = [
        f"pm.{kind}.@{name}.{request_id}" for kind in ("cancel", "tokens") for name in TENANTS
    ]
    hostile.errors.clear()
    for subject in forged:
        await hostile.nc.publish(subject, b"{}")
    await hostile.nc.flush()

    def are_refused() -> bool:
        refusals = [error for error in hostile.errors if "permissions violation" in error]
        return len(refusals) == len(forged)

    await system.wait_for("refused_after_s", are_refused, REFUSED_S)


@cell(
    "tenants: connections without end",
    f"{NUM_CONNECTIONS:,} with the key of a tenant, and as many without a key; 1,024 descriptors",
    "answers meanwhile",
    on="up, few files",
    load_s=20,
)
async def connections(system: WholeSystem) -> None:
    """Open connections and keep them, and replace an engine meanwhile."""
    # The server closes a connection without a login after two seconds.
    strangers = await asyncio.to_thread(_open_strangers, system.broker_port)
    await system.probe("beside_strangers", SERVED_S)
    for connection in strangers:
        connection.close()
    opened: list[RawConnection] = []
    key = system.key(HOSTILE)
    try:
        for _ in range(NUM_CONNECTIONS):
            connection = await asyncio.to_thread(RawConnection, system.broker_port, key)
            if not connection.is_accepted:
                connection.close()
                continue
            opened.append(connection)
        num_open = sum(connection.is_open for connection in opened)
        system.outcome.figures["accepted"] = num_open
        # One of the places has the client of the system.
        if num_open >= MAX_ACCEPTED:
            system.note(f"a tenant has {num_open} connections")
        for pid in system.workers("engine"):
            os.kill(pid, signal.SIGKILL)
        await system.probe("meanwhile", SERVED_S)
    finally:
        for connection in opened:
            connection.close()
    await system.probe("after_attack", SERVED_S)
    if "broker_restarted" in system.log:
        system.note("the broker was restarted")


def _open_strangers(port: int) -> list[RawConnection]:
    opened = []
    for _ in range(NUM_CONNECTIONS):
        with contextlib.suppress(OSError):
            opened.append(RawConnection(port))
    return opened


@cell(
    "tenants: subscriptions without end",
    f"{NUM_SUBSCRIPTIONS:,} over all connections of a tenant",
    f"{MAX_GROWTH_MIB:.0f} MiB",
    on="up",
    load_s=15,
)
async def subscriptions(system: WholeSystem) -> None:
    """Send subscriptions on all connections of a tenant, and ignore the errors."""
    before_mib = system.broker_rss_mib()
    key, opened = system.key(HOSTILE), []
    for _ in range(MAX_ACCEPTED - 1):
        opened.append(await asyncio.to_thread(RawConnection, system.broker_port, key))
    each = NUM_SUBSCRIPTIONS // len(opened)
    accepted = [
        await asyncio.to_thread(_subscribe, connection, number, each)
        for number, connection in enumerate(opened)
    ]
    system.outcome.figures["accepted"] = sum(accepted)
    system.outcome.figures["growth_mib"] = growth_mib = system.broker_rss_mib() - before_mib
    if growth_mib > MAX_GROWTH_MIB:
        system.note(f"the broker has grown by {growth_mib:.0f} MiB")
    await system.probe("meanwhile", SERVED_S)
    for connection in opened:
        connection.close()


def _subscribe(connection: RawConnection, number: int, count: int) -> int:
    """Send subscriptions, and return how many the broker has."""
    subjects = (b"SUB pm.tokens.%d-%d %d\r\n" % (number, i, i) for i in range(count))
    try:
        connection.send(b"".join(subjects))
        return count - connection.count_errors()
    except OSError:
        return 0  # The broker has closed the connection.


@cell(
    "tenants: connections that do not read",
    f"all connections of a tenant get the same pages of 1 MiB, {UNREAD_S:.0f} s",
    f"{MAX_UNREAD_MIB:.0f} MiB",
    on="up",
    load_s=20,
)
async def unread(system: WholeSystem) -> None:
    """Have many pages of a long answer sent to all connections of a tenant, which do not read."""
    hostile, request_id = system.clients[HOSTILE], random_id(system.rng)
    sampling = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True, "logprobs": 20}
    await hostile.ask(request_id, body_of(QUESTIONS[HOSTILE], sampling_params=sampling))
    opened = []
    for _ in range(MAX_ACCEPTED - 1):
        connection = await asyncio.to_thread(RawConnection, system.broker_port, system.key(HOSTILE))
        connection.send(b"SUB _INBOX.unread 1\r\n")
        await asyncio.to_thread(connection.count_errors)
        opened.append(connection)
    before_mib, began = system.broker_rss_mib(), time.monotonic()
    probe = asyncio.create_task(system.probe("meanwhile", SERVED_S))
    while time.monotonic() - began < UNREAD_S:
        query = b'{"max_bytes": 1048576}'
        await hostile.nc.publish(f"pm.read.{request_id}", query, reply="_INBOX.unread")
        await asyncio.sleep(0.005)
        system.outcome.note_largest("growth_mib", system.broker_rss_mib() - before_mib)
    await probe
    for connection in opened:
        connection.close()
    if system.outcome.figures["growth_mib"] > MAX_UNREAD_MIB:
        system.note("the broker has grown beyond the bound")
    await system.probe("after_attack", SERVED_S)


@cell(
    "overload: cancel storm without workers",
    "all places are taken and cancelled, while renderers and engines are stopped",
    "places at once",
    on="up",
    load_s=1,
)
async def cancel_storm(system: WholeSystem) -> None:
    """Take all places of the queue, cancel all of these requests, and take the places again."""
    hostile, body = system.clients[HOSTILE], body_of(QUESTIONS[HOSTILE])
    await _until_queues_are_empty(system)
    pids = [pid for role in ("renderer", "engine") for pid in system.workers(role)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        first = await _take_places(system, hostile, body)
        system.outcome.figures["places"] = len(first)
        await asyncio.gather(*(hostile.cancel(request_id) for request_id in first))
        await asyncio.gather(*(_check_end(system, hostile, id, "cancelled") for id in first))
        second = await _take_places(system, hostile, body)
        if len(second) != len(first):
            system.note(f"{len(second)} of {len(first)} cancelled requests have left their places")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*(_check_end(system, hostile, request_id, "") for request_id in second))
    await system.probe("after_storm", SERVED_S)


async def _take_places(system: WholeSystem, client: PlainClient, body: bytes) -> list[str]:
    """Publish requests until one is refused, and return the ids of the others."""
    ids: list[str] = []
    while True:
        request_id = random_id(system.rng)
        if await client.publish(request_id, body):
            return ids
        ids.append(request_id)


async def _check_end(system: WholeSystem, client: PlainClient, request_id: str, code: str) -> None:
    """Wait for the end of a request, and compare the code of its error."""
    page = await client.read(request_id)
    while not page.get("ended"):
        await asyncio.sleep(PAUSE_S)
        try:
            page = await client.read(request_id, page.get("next", 0))
        except (NatsError, TimeoutError):
            continue
    error = page["records"][-1].get("error", {}) if page["records"] else {}
    if error.get("code", "") != code:
        system.note(f"{request_id} ended with {error.get('code')!r} instead of {code!r}")


async def _until_queues_are_empty(system: WholeSystem) -> None:
    operator = await system.connect_operator()

    async def are_empty() -> bool:
        return not any(size_of(stream) for stream in await queues(operator))

    await system.wait_for("empty_after_s", are_empty, SERVED_S)
    await operator.close()
