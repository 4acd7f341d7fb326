"""The steps of the acceptance test; each returns its figures and raises CheckFailed."""

import asyncio
import re
import subprocess
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.cluster.compose import (
    BROKERS,
    KEYS,
    PROXY,
    CheckFailed,
    Compose,
    Container,
    is_broker,
    run,
)
from ops.cluster.door import Door, Tally, read_cases
from ops.cluster.upgrade import upgrade

START_S = 600.0
RESTART_S = 300.0
BLOB_PORT = 9200
# 24 kHz, 16 bit.
SPEECH_BYTES_PER_S = 48_000
# The grace of the compose file, and what the command itself takes.
ENGINE_GRACE_S = 30.0
LOAD_PER_S = 2.0
QUIET_S = 20.0
NUM_ANSWERS, NUM_TOKENS = 8, 600
TEXTS = (
    "There is one red circle on a blue background.",
    "There are two green squares on a white background.",
    "There are three yellow stars on a black background.",
)
STARTING_STOP_S = 3.0
STARTING_DELAYS_S = (0.3, 1.5)
KILLED = 137
# The proxy passes on the requests of clients, and agents call servers of tools.
WITH_A_WAY_OUT = (PROXY, "agent")
_ESTABLISHED = "01"


@dataclass(frozen=True)
class Step:
    """The figures of a step that has passed."""

    title: str
    figures: str


def check_isolation(compose: Compose, port: int) -> Step:
    """The door is the only published port, and no container has more rights than it needs."""
    containers = compose.all_containers()
    published = {c.name: c.published for c in containers if c.published}
    doors = compose.containers(PROXY)
    if published != {c.name: [("127.0.0.1", str(port))] for c in doors}:
        raise CheckFailed(f"published ports: {published}")
    faults = [f"{c.name}: {fault}" for c in containers for fault in c.faults()]
    if faults:
        raise CheckFailed("; ".join(faults))
    internal = {name for name in compose.networks() if compose.is_internal(name)}
    rest = [c for c in containers if c.service not in WITH_A_WAY_OUT]
    open_to = [c.name for c in rest if not set(c.networks) <= internal]
    if open_to or not internal:
        raise CheckFailed(f"these containers have a way out of the network: {', '.join(open_to)}")
    ways_out = len(containers) - len(rest)
    return Step(
        "isolation", f"{len(containers)} containers, 1 published port, {ways_out} with a way out"
    )


def check_keys(compose: Compose) -> Step:
    """A worker has the key of its role and no other, and a server has no key at all."""
    containers = compose.all_containers()
    for container in containers:
        if container.service == PROXY:
            continue
        is_broker = container.role == BROKERS
        names = ["accounts.conf", "nats_password"] if is_broker else [f"{container.role}.nk"]
        find = ["find", "/run/", "-type", "f", "-path", "*keys*"]
        files = sorted(run(["docker", "exec", container.id, *find]).split())
        if files != [f"{KEYS}/{name}" for name in names]:
            raise CheckFailed(f"{container.name} has {files}, and should have {names} in {KEYS}")
    roles = {container.role for container in containers} - {BROKERS, PROXY}
    return Step("keys", f"{len(containers)} containers, {len(roles)} roles, each has its own alone")


async def check_answers(door: Door, rounds: int = 1) -> Step:
    """Questions about images are answered rightly, with others at the same time."""
    tally = await door.ask_all(read_cases() * rounds)
    if tally.failures:
        raise CheckFailed("; ".join(tally.failures[:5]))
    figures = f"{tally.num_requests} of {tally.num_requests} right, p50 {_ms(tally, 0.5)}"
    return Step("answers over HTTP", figures)


async def check_transports(compose: Compose) -> Step:
    """Payloads have gone from container to container by TCP, and no transport has failed."""
    failed = [line for line in compose.logs().splitlines() if "transport_failed" in line]
    if failed:
        raise CheckFailed(f"{len(failed)} payloads failed by TCP: {failed[0]}")
    readers = {}
    for service in ("encoder", "engine"):
        tables = [
            run(["docker", "exec", c.id, "cat", "/proc/net/tcp"])
            for c in compose.containers(service)
        ]
        readers[service] = sum(connections(table, BLOB_PORT) for table in tables)
    if not all(readers.values()):
        raise CheckFailed(f"no connection to a payload's owner: {readers}")
    counts = ", ".join(f"{count} of {service}" for service, count in readers.items())
    return Step("payloads by TCP", f"connections to owners: {counts}; no failure")


def connections(table: str, port: int) -> int:
    """Return how many connections to `port` of another machine are open."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return sum(int(row[2].split(":")[1], 16) == port and row[3] == _ESTABLISHED for row in rows)


async def check_speech(compose: Compose, door: Door) -> Step:
    """Speeches whose talker and generator are killed have the samples of undisturbed ones."""
    expected = await door.speeches(TEXTS, asyncio.Event())
    begun = asyncio.Event()
    speeches = asyncio.create_task(door.speeches(TEXTS, begun))
    await begun_or_ended(begun, speeches)
    killed = [compose.containers(service)[0] for service in ("talker", "generator")]
    for container in killed:
        await asyncio.to_thread(run, ["docker", "kill", container.id])
    for container in killed:
        await asyncio.to_thread(run, ["docker", "start", container.id])
    again = await speeches
    compose.wait_healthy(RESTART_S, "generator")
    seconds = sum(map(len, expected)) / SPEECH_BYTES_PER_S
    equal = sum(a == b for a, b in zip(expected, again, strict=True))
    if equal < len(TEXTS) or not all(expected):
        raise CheckFailed(f"{equal} of {len(TEXTS)} speeches equal, {seconds:.1f} s of sound")
    figures = f"{seconds:.1f} s of sound, {equal} of {len(TEXTS)} equal after kills of both stages"
    return Step("speech", figures)


async def check_rolling_restart(compose: Compose, door: Door) -> Step:
    """Every container restarts, one after the other, under a steady load that loses nothing."""
    # Otherwise requests would wait for the start of the only one.
    compose.up(engine=2, encoder=2)
    await asyncio.to_thread(compose.wait_healthy, START_S)
    quiet = await _under_load(door, asyncio.sleep(QUIET_S))
    restarts = Tally()

    async def restart_all() -> None:
        for service in compose.services():
            for container in compose.containers(service):
                began = time.monotonic()
                await asyncio.to_thread(run, ["docker", "restart", container.id])
                await asyncio.to_thread(compose.wait_healthy, RESTART_S, service)
                restarts.latencies_s.append(time.monotonic() - began)

    tally = await _under_load(door, restart_all())
    if tally.failures:
        raise CheckFailed(f"{len(tally.failures)} failures: {'; '.join(tally.failures[:5])}")
    letters = compose.command("run", "--rm", "-T", "operator", "dead", "list")
    if "no dead letters" not in letters:
        raise CheckFailed(f"dead letters:\n{letters}")
    figures = (
        f"{len(restarts.latencies_s)} restarts in {sum(restarts.latencies_s):.0f} s;"
        f" {tally.num_requests} requests, 0 failures, 0 dead letters,"
        f" {tally.num_retries} sent again; p50 {_ms(tally, 0.5)}, p99 {_ms(tally, 0.99)}"
        f" (quiet: {_ms(quiet, 0.5)}, {_ms(quiet, 0.99)})"
    )
    return Step("rolling restart", figures)


async def check_upgrade(compose: Compose, door: Door, image: str, progress: Path) -> Step:
    """All containers are replaced under a steady load, and next to long answers."""
    (expected,) = await door.long_texts(1, NUM_TOKENS, asyncio.Event())
    quiet = await _under_load(door, asyncio.sleep(QUIET_S))
    compose.env["IMAGE"] = image
    began, texts, stop = time.monotonic(), Counter[bool](), asyncio.Event()

    async def read_long_answers() -> None:
        while not stop.is_set():
            (text,) = await door.long_texts(1, NUM_TOKENS, asyncio.Event())
            texts[text == expected] += 1

    async def replace_all() -> None:
        reading = asyncio.create_task(read_long_answers())
        try:
            await asyncio.to_thread(upgrade, Compose(compose.env, compose.words), progress)
        finally:
            stop.set()
            await reading

    tally = await _under_load(door, replace_all())
    old = [c.name for c in compose.all_containers() if c.service != PROXY and c.image != image]
    if tally.failures or tally.num_retries or texts[False] or old:
        raise CheckFailed(
            f"{tally.num_retries} requests sent again, {texts[False]} long answers differ, old:"
            f" {old}, {len(tally.failures)} failures: {'; '.join(tally.failures[:5])}"
        )
    figures = (
        f"{time.monotonic() - began:.0f} s; {tally.num_requests} streamed requests, 0 failures, 0"
        f" sent again; {texts[True]} of {texts[True]} answers of {NUM_TOKENS} tokens equal; p50"
        f" {_ms(tally, 0.5)}, p99 {_ms(tally, 0.99)} (quiet: {_ms(quiet, 0.5)}, {_ms(quiet, 0.99)})"
    )
    return Step("upgrade", figures)


async def check_refused_upgrade(compose: Compose, door: Door, image: str, progress: Path) -> Step:
    """An image whose workers do not start leaves the old workers, which answer all the time."""
    workers = [c.id for c in compose.all_containers() if c.role not in (BROKERS, PROXY)]
    reasons: list[str] = []

    async def try_upgrade() -> None:
        try:
            refused = Compose(compose.env | {"IMAGE": image}, compose.words)
            await asyncio.to_thread(upgrade, refused, progress)
        except CheckFailed as error:
            reasons.append(str(error).partition("\n")[0])

    tally = await _under_load(door, try_upgrade())
    left = [c.id for c in compose.all_containers() if c.role not in (BROKERS, PROXY)]
    if tally.failures or not reasons or left != workers:
        raise CheckFailed(
            f"{len(tally.failures)} failures: {'; '.join(tally.failures[:5])}; {reasons};"
            f" {len(set(workers) - set(left))} of {len(workers)} workers replaced"
        )
    figures = f"{reasons[0]} {tally.num_requests} requests, 0 failures; no worker replaced"
    return Step("upgrade to an image that does not start", figures)


async def _under_load(door: Door, work: Coroutine[Any, Any, None]) -> Tally:
    """Ask steadily while `work` runs, and return the outcomes."""
    tally, stop = Tally(), asyncio.Event()
    load = asyncio.create_task(door.ask_steadily(LOAD_PER_S, stop, tally))
    try:
        await work
    finally:
        stop.set()
        await load
    return tally


async def check_drain(compose: Compose, door: Door) -> Step:
    """The only engine is stopped with long answers in flight, and all their texts stay the same."""
    compose.up(engine=1, encoder=1)
    compose.wait_healthy(RESTART_S, "engine")
    expected = await door.long_texts(NUM_ANSWERS, NUM_TOKENS, asyncio.Event())
    begun = asyncio.Event()
    answers = asyncio.create_task(door.long_texts(NUM_ANSWERS, NUM_TOKENS, begun))
    await begun_or_ended(begun, answers)
    (engine,) = compose.containers("engine")
    seconds = await asyncio.to_thread(_stop, engine)
    (engine,) = compose.containers("engine")
    await asyncio.to_thread(run, ["docker", "start", engine.id])
    texts = await answers
    compose.wait_healthy(RESTART_S, "engine")
    if engine.exit_code != 0 or seconds > ENGINE_GRACE_S:
        raise CheckFailed(f"the engine ended with {engine.exit_code} after {seconds:.1f} s")
    different = sum(a != b for a, b in zip(expected, texts, strict=True))
    if different:
        raise CheckFailed(f"{different} of {len(texts)} texts differ after the engine's stop")
    figures = f"exit code 0 after {seconds:.1f} s, {len(texts)} of {len(texts)} texts equal"
    return Step("drain of an engine", figures)


async def begun_or_ended(begun: asyncio.Event, answers: asyncio.Task[Any]) -> None:
    """Wait until all answers have begun. Raises what has ended them before."""
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait({waiting, answers}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not begun.is_set():
        await answers


def check_stop_while_starting(compose: Compose) -> Step:
    """A worker that is starting ends soon after SIGTERM, and is not killed."""
    slowest, count = 0.0, 0
    for service in compose.services():
        containers = compose.containers(service)
        if is_broker(service) or service == PROXY:
            continue
        container = containers[0]
        for delay_s in STARTING_DELAYS_S:
            _stop(container)
            run(["docker", "start", container.id])
            time.sleep(delay_s)
            seconds = _stop(container)
            code = compose.containers(service)[0].exit_code
            if seconds > STARTING_STOP_S or code == KILLED:
                raise CheckFailed(
                    f"{service}, stopped {delay_s} s after its start: exit code {code} after"
                    f" {seconds:.1f} s"
                )
            slowest, count = max(slowest, seconds), count + 1
        run(["docker", "start", container.id])
    compose.wait_healthy(RESTART_S)
    return Step("stop while starting", f"{count} stops, at most {slowest:.1f} s, none killed")


def _stop(container: Container) -> float:
    began = time.monotonic()
    subprocess.run(["docker", "stop", container.id], check=True, capture_output=True)
    return time.monotonic() - began


def _ms(tally: Tally, share: float) -> str:
    return f"{1000 * tally.percentile_s(share):.0f} ms"


def versions(compose: Compose) -> str:
    """Return what runs inside, for the report."""
    server = compose.inside("nats-0", "nats-server", "--version").strip()
    pagemill = compose.inside("gateway", "pagemill", "--version").strip()
    return f"pagemill {pagemill}, {re.sub('^nats-server: ', 'nats-server ', server)}"
