"""Cells about large payloads: owners and readers that die, freeze, forge keys, or lack memory."""

import asyncio
import base64
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from ops.chaos import fake_model
from ops.chaos.alterations import environment, no_local_socket, no_sockets, slow_reader
from ops.chaos.history import WorkerEvent, now, read_events
from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.cells.common import (
    WORKER_S,
    altered,
    count_answers,
    new_id,
    stopped,
    wait_for_load,
)
from ops.chaos.matrix.cells.processes import sigkill
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.plan import IMAGES, MODEL
from shared.blobs import protocol
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.config.schema import BlobsConfig
from shared.errors import BlobLost
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat
from shared.protocol.multimodal import IMAGE, BlobRef, content_hash
from shared.protocol.records import LogRecord
from shared.protocol.requests import ContentPart, ImagePart, ImageURL, TextPart
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, Task

# Each of the three transports waits for an answer before the image is rendered again. Tasks of a
# frozen worker are redelivered after the ack wait.
FROZEN_S = 10.0
FROZEN_REQUESTS = 6
NUM_LARGE_IMAGES = 5
MIB = 2**20


_cell = partial(cell, on="payloads")


@_cell(
    "shared memory: writer killed",
    "kill -9 of renderers while engines read for 0.5 s, three times",
    "5 s",
    load_s=12,
    role="renderer",
)
@_cell(
    "shared memory: reader killed",
    "kill -9 of engines while they read for 0.5 s, three times",
    "5 s",
    load_s=12,
    role="engine",
)
async def killed_while_read(deployment: Deployment, role: str) -> None:
    """Kill owners or readers of payloads while engines read each of them for half a second."""
    async with altered(deployment, deployment.slots_of("engine"), *environment(slow_reader)):
        await sigkill(deployment, role)


@_cell("shared memory: writer truncates", "truncate of /proc/PID/fd/N, as root", "refused")
async def owner_truncates(deployment: Deployment) -> None:
    await wait_for_load(deployment)
    tried = 0
    for slot in deployment.slots_of("renderer"):
        for link in _arenas(slot.pid):
            tried += 1
            try:
                os.truncate(link, 0)
                deployment.note("I7: an arena could be truncated")
            except PermissionError:
                pass
    deployment.outcome.figures["tried"] = tried
    await deployment.probe("after_truncating", WORKER_S)


@_cell(
    "shared memory: /dev/shm full",
    "renderers in a mount namespace with a full tmpfs there",
    "5 s",
)
async def no_shm(deployment: Deployment) -> None:
    """Give renderers a full /dev/shm, which arenas do not need."""
    script = (
        "mount -t tmpfs -o size=64k none /dev/shm && cat /dev/zero >/dev/shm/full 2>/dev/null;"
        ' exec "$@"'
    )
    async with altered(
        deployment, deployment.slots_of("renderer"), "unshare", "--mount", "sh", "-c", script, "sh"
    ):
        began = now()
        await deployment.probe("shm_full", WORKER_S)
        await asyncio.sleep(3.0)
        if not _num_read(deployment, "SharedMemoryTransport", began):
            deployment.note("no payload was read")


@_cell("shared memory: stale generation", "the key of a request that has ended", "lost")
async def stale_reference(deployment: Deployment) -> None:
    """Check that a reference is valid until its request has ended, and not later."""
    async with deployment.bus("stale") as bus, _reader(bus) as blobs:
        with stopped(deployment, "engine"):
            (task,) = _send_large(deployment, bus, 1)
            refs = await _references(deployment, bus, task.get_name())
            for ref in refs:
                (await blobs.get(ref)).close()
        count_answers(deployment, "stale", [await task])
        # Payloads are released after the final record.
        await asyncio.sleep(1.0)
        for ref in refs:
            await _must_be_lost(deployment, blobs, ref, "of a request that has ended")


@_cell("shared memory: forged handle", "random keys", "lost")
async def forged_reference(deployment: Deployment) -> None:
    await wait_for_load(deployment)
    async with deployment.bus("forged") as bus, _reader(bus) as blobs:
        for beat in await _renderers(deployment, bus):
            for _ in range(20):
                key = secrets.token_bytes(protocol.KEY_BYTES)
                await _must_be_lost(
                    deployment, blobs, BlobRef(beat.worker, key, MIB), "that was never issued"
                )
                chunk = protocol.pack_chunk(protocol.BlobChunk(protocol.GET, key, 0, 2**62))
                if await bus.request(subjects.blob(beat.worker), chunk, 2.0):
                    deployment.note("I7: a forged key was answered with data")
    await deployment.probe("after_forging", WORKER_S)


@_cell(
    "shared memory: owner frozen",
    "kill -STOP of a renderer with unread payloads",
    f"{FROZEN_S:.0f} s",
    load_s=4,
)
async def owner_frozen(deployment: Deployment) -> None:
    """Freeze an owner of unread payloads: another renderer must render them again."""
    await wait_for_load(deployment)
    owner = deployment.slot("renderer", 0)
    async with deployment.bus("frozen") as bus:
        with stopped(deployment, "engine"):
            tasks = _send_large(deployment, bus, FROZEN_REQUESTS)
            for task in tasks:
                await _references(deployment, bus, task.get_name())
            deployment.signal(owner, "stop", signal.SIGSTOP)
        pid, began = owner.pid, now()
        try:
            answers = await asyncio.wait_for(
                asyncio.gather(*tasks, return_exceptions=True), 2 * FROZEN_S
            )
            took_s = now() - began
        finally:
            deployment.pool.resume(pid)
    deployment.outcome.figures["beside_frozen"] = took_s
    if took_s > FROZEN_S:
        deployment.note(f"I9: {took_s:.1f} s until the last answer, with a frozen owner")
    count_answers(deployment, "frozen", answers)
    await deployment.probe("after_frozen", WORKER_S)


@_cell(
    "shared memory: arena full",
    "12 MiB for four requests of 10 MiB, engines stopped for 4 s",
    "no error",
)
async def arena_full(deployment: Deployment) -> None:
    """Send requests of 10 MiB while engines are stopped; the arena has room for one of them."""
    async with (
        altered(deployment, deployment.slots_of("renderer"), "env", "PAGEMILL_BLOBS__ARENA_MIB=12"),
        deployment.bus("full") as bus,
    ):
        with stopped(deployment, "engine"):
            tasks = _send_large(deployment, bus, 4, NUM_LARGE_IMAGES)
            await asyncio.sleep(4.0)
        count_answers(deployment, "large", await asyncio.gather(*tasks, return_exceptions=True))
        await deployment.probe("after_full", WORKER_S)


@_cell(
    "shared memory: no local socket",
    "engines cannot connect to it",
    "by TCP",
    alteration=no_local_socket,
    left="TcpTransport",
)
@_cell(
    "shared memory: no socket at all",
    "nor by TCP",
    "by the broker",
    alteration=no_sockets,
    left="BusTransport",
)
async def without_transports(
    deployment: Deployment, alteration: Callable[[], None], left: str
) -> None:
    """Refuse engines' connections by some transports; they must use the remaining one."""
    async with altered(deployment, deployment.slots_of("engine"), *environment(alteration)):
        began = now()
        async with deployment.bus("transports") as bus:
            answers = await asyncio.gather(*_send_large(deployment, bus, 4))
            count_answers(deployment, "asked", [*answers])
        await asyncio.sleep(2.0)
        deployment.outcome.figures["read"] = num = _num_read(deployment, left, began)
        if not num:
            deployment.note(f"nothing was read by {left}")
        await deployment.probe("beside_transports", WORKER_S)


# -- building blocks --------------------------------------------------------------------------


def _large_images() -> list[str]:
    """Return URLs of images of 2 MiB that no request has used before."""
    data = (IMAGES / "red.png").read_bytes()
    urls: list[str] = []
    while len(urls) < NUM_LARGE_IMAGES:
        file = data + secrets.token_hex(8).encode()
        mm_hash = fake_model.FakeProcessor.hash_media(None, IMAGE, content_hash(file), "")  # type: ignore[arg-type]
        if fake_model.image_bytes(mm_hash) == 2 * MIB:
            urls.append(f"data:image/png;base64,{base64.b64encode(file).decode()}")
    return urls


def _send_large(
    deployment: Deployment, bus: Bus, requests: int, num_images: int = 1
) -> "list[asyncio.Task[list[LogRecord]]]":
    """Send requests with large images; the tasks have the request ids as names."""
    tasks = []
    for number in range(requests):
        images = [ImagePart(ImageURL(url)) for url in _large_images()[:num_images]]
        id, sampling = new_id(f"large-{number}"), SamplingParams(max_tokens=8)
        content: list[ContentPart] = [*images, TextPart("?")]
        answer = deployment.ask(bus, id, sampling, content, timeout_s=60.0)
        tasks.append(asyncio.create_task(answer, name=id))
    return tasks


async def _references(deployment: Deployment, bus: Bus, request_id: str) -> list[BlobRef]:
    """Return the payload references of a task that waits for an engine."""
    subject = subjects.stage("engine", MODEL, "interactive", request_id)
    async with asyncio.timeout(10):
        while (stored := await bus.read_last(subjects.STAGES_STREAM, subject)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    task, _ = envelope.decode(stored.data, Task[EngineBody])
    refs = task.body.blobs()
    if not refs:
        deployment.note("a large image travelled in the message")
    return refs


@contextlib.asynccontextmanager
async def _reader(bus: Bus) -> AsyncIterator[Blobs]:
    blobs = Blobs(bus, "matrix", f"matrix-{secrets.token_hex(4)}", BlobsConfig(arena_mib=1))
    await blobs.start()
    try:
        yield blobs
    finally:
        await blobs.close()


def _arenas(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    links = [f"{folder}/{name}" for name in os.listdir(folder)]
    return [link for link in links if os.readlink(link).startswith("/memfd:pagemill")]


async def _must_be_lost(deployment: Deployment, blobs: Blobs, ref: BlobRef, kind: str) -> None:
    try:
        (await blobs.get(ref)).close()
    except BlobLost:
        return
    deployment.note(f"I7: a payload could be read by a key {kind}")


async def _renderers(deployment: Deployment, bus: Bus) -> Sequence[Heartbeat]:
    pids = {slot.pid for slot in deployment.slots_of("renderer")}
    return [beat for beat in await bus.heartbeats.read() if beat.pid in pids]


def _num_read(deployment: Deployment, transport: str, since: float) -> int:
    return sum(
        isinstance(event, WorkerEvent) and event.step == f"read by {transport}" and event.t > since
        for file in (deployment.folder / "workers").glob("engine-*.jsonl")
        for event in read_events(file)
    )
