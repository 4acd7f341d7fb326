"""Cells about large payloads: their owners and readers die, freeze, lie, or have no room."""

import asyncio
import base64
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec

from ops.chaos import fake_model
from ops.chaos.alterations import environment, slow_reader
from ops.chaos.history import Did, now, read_events
from ops.chaos.matrix.cells.common import (
    WORKER_S,
    count_answers,
    dressed,
    lead_in,
    new_id,
    slots_of,
)
from ops.chaos.matrix.cells.processes import sigkill
from ops.chaos.matrix.scene import Disturb, Scene
from ops.chaos.plan import MODEL, PICTURES
from shared import client
from shared.blobs import protocol
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.config import BlobsConfig
from shared.errors import BlobLost
from shared.protocol import subjects
from shared.protocol.messages import (
    EngineTask,
    GenerateRequest,
    Heartbeat,
    ImagePart,
    ImageURL,
    LogRecord,
    Message,
    TextPart,
)
from shared.protocol.multimodal import IMAGE, BlobRef, content_hash
from shared.protocol.sampling import SamplingParams

# Three roads, each of which waits for an answer, and then the picture is made again; what a frozen
# worker had in hand is known to be lost after the ack wait.
FROZEN_S = 10.0
FROZEN_REQUESTS = 6
LARGE_PICTURES = 5
MIB = 2**20


@contextlib.contextmanager
def stopped(scene: Scene, role: str) -> Iterator[None]:
    slots = slots_of(scene, role)
    pids = [slot.pid for slot in slots]
    for slot in slots:
        scene.signal(slot, "stop", signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            scene.pool.resume(pid)


def killed_while_read(role: str) -> Disturb:
    """Every engine looks at a payload for half a second; owners or readers die meanwhile."""

    async def disturb(scene: Scene) -> None:
        async with dressed(scene, slots_of(scene, "engine"), *environment(slow_reader)):
            await sigkill(role)(scene)

    return disturb


async def owner_truncates(scene: Scene) -> None:
    await lead_in(scene)
    tried = 0
    for slot in slots_of(scene, "renderer"):
        for link in _arenas(slot.pid):
            tried += 1
            try:
                os.truncate(link, 0)
                scene.note("I7: an arena could be truncated")
            except PermissionError:
                pass
    scene.outcome.figures["tried"] = tried
    await scene.probe("after_truncating", WORKER_S)


async def no_shm(scene: Scene) -> None:
    """Renderers for which /dev/shm is full: arenas have no name, and no place in it."""
    script = (
        "mount -t tmpfs -o size=64k none /dev/shm && cat /dev/zero >/dev/shm/full 2>/dev/null;"
        ' exec "$@"'
    )
    async with dressed(
        scene, slots_of(scene, "renderer"), "unshare", "--mount", "sh", "-c", script, "sh"
    ):
        began = now()
        await scene.probe("shm_full", WORKER_S)
        await asyncio.sleep(3.0)
        if not _num_read(scene, "SharedMemoryTransport", began):
            scene.note("no payload was read")


async def stale_reference(scene: Scene) -> None:
    """A reference is good until its request has ended, and never again."""
    async with scene.bus("stale") as bus, _reader(bus) as blobs:
        with stopped(scene, "engine"):
            (asked,) = _ask_large(bus, 1)
            refs = await _references(scene, bus, asked.get_name())
            for ref in refs:
                (await blobs.get(ref)).close()
        count_answers(scene, "stale", [await asked])
        # The release comes after the final record.
        await asyncio.sleep(1.0)
        for ref in refs:
            await _must_be_lost(scene, blobs, ref, "of a request that has ended")


async def forged_reference(scene: Scene) -> None:
    await lead_in(scene)
    async with scene.bus("forged") as bus, _reader(bus) as blobs:
        for beat in await _renderers(scene, bus):
            for _ in range(20):
                key = secrets.token_bytes(protocol.KEY_BYTES)
                await _must_be_lost(scene, blobs, BlobRef(beat.worker, key, MIB), "never given")
                piece = protocol.pack_chunk(protocol.BlobChunk(protocol.GET, key, 0, 2**62))
                if await bus.request(subjects.blob(beat.worker), piece, 2.0):
                    scene.note("I7: a piece was given for a forged key")
    await scene.probe("after_forging", WORKER_S)


async def owner_frozen(scene: Scene) -> None:
    """Engines ask an owner that does not answer: what it has is made again by another."""
    await lead_in(scene)
    owner = scene.slot("renderer", 0)
    async with scene.bus("frozen") as bus:
        with stopped(scene, "engine"):
            asked = _ask_large(bus, FROZEN_REQUESTS)
            for task in asked:
                await _references(scene, bus, task.get_name())
            scene.signal(owner, "stop", signal.SIGSTOP)
        pid, began = owner.pid, now()
        try:
            answers = await asyncio.wait_for(
                asyncio.gather(*asked, return_exceptions=True), 2 * FROZEN_S
            )
            took_s = now() - began
        finally:
            scene.pool.resume(pid)
    scene.outcome.figures["beside_frozen"] = took_s
    if took_s > FROZEN_S:
        scene.note(f"I9: {took_s:.1f} s until the last answer beside a frozen owner")
    count_answers(scene, "frozen", answers)
    await scene.probe("after_frozen", WORKER_S)


async def arena_full(scene: Scene) -> None:
    """Requests of ten MiB, which fit one at a time, while nobody reads."""
    async with (
        dressed(scene, slots_of(scene, "renderer"), "env", "PAGEMILL_BLOBS__ARENA_MIB=12"),
        scene.bus("full") as bus,
    ):
        with stopped(scene, "engine"):
            asked = _ask_large(bus, 4, LARGE_PICTURES)
            await asyncio.sleep(4.0)
        count_answers(scene, "large", await asyncio.gather(*asked, return_exceptions=True))
        await scene.probe("after_full", WORKER_S)


def without_transports(alteration: Callable[[], None], left: str) -> Disturb:
    """Let engines connect to no owner by some transports; they must use the one that is left."""

    async def disturb(scene: Scene) -> None:
        async with dressed(scene, slots_of(scene, "engine"), *environment(alteration)):
            began = now()
            async with scene.bus("roads") as bus:
                count_answers(scene, "asked", await asyncio.gather(*_ask_large(bus, 4)))
            await asyncio.sleep(2.0)
            scene.outcome.figures["read"] = num = _num_read(scene, left, began)
            if not num:
                scene.note(f"nothing was read by {left}")
            await scene.probe("beside_roads", WORKER_S)

    return disturb


# -- what they are made of --------------------------------------------------------------------


def _large_pictures() -> list[str]:
    """URLs of pictures of 2 MiB that nobody has asked for before."""
    data = (PICTURES / "red.png").read_bytes()
    urls: list[str] = []
    while len(urls) < LARGE_PICTURES:
        file = data + secrets.token_hex(8).encode()
        mm_hash = fake_model.FakeProcessor.hash_media(None, IMAGE, content_hash(file), "")  # type: ignore[arg-type]
        if fake_model.picture_bytes(mm_hash) == 2 * MIB:
            urls.append(f"data:image/png;base64,{base64.b64encode(file).decode()}")
    return urls


def _ask_large(bus: Bus, requests: int, pictures: int = 1) -> "list[asyncio.Task[list[LogRecord]]]":
    """Tasks are named by the request ids."""
    asked = []
    for number in range(requests):
        parts: list[TextPart | ImagePart] = [
            ImagePart(ImageURL(url)) for url in _large_pictures()[:pictures]
        ]
        message = Message("user", [*parts, TextPart("?")])
        request = GenerateRequest(MODEL, [message], SamplingParams(max_tokens=8), timeout_s=60.0)
        id = new_id(f"large-{number}")
        asked.append(asyncio.create_task(_all(bus, request, id), name=id))
    return asked


async def _all(bus: Bus, request: GenerateRequest, id: str) -> list[LogRecord]:
    return [record async for record in client.ask(bus, request, id)]


async def _references(scene: Scene, bus: Bus, request_id: str) -> list[BlobRef]:
    """Of the message that waits for an engine."""
    subject = subjects.stage("engine", MODEL, "interactive", request_id)
    async with asyncio.timeout(10):
        while (stored := await bus.read_last(subjects.STAGES_STREAM, subject)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    task, _ = envelope.decode(stored.data, EngineTask)
    refs = [item.blob for item in task.items if item.blob is not None]
    if not refs:
        scene.note("a large picture did not go beside the message")
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


async def _must_be_lost(scene: Scene, blobs: Blobs, ref: BlobRef, what: str) -> None:
    try:
        (await blobs.get(ref)).close()
    except BlobLost:
        return
    scene.note(f"I7: a payload was had by a key {what}")


async def _renderers(scene: Scene, bus: Bus) -> Sequence[Heartbeat]:
    pids = {slot.pid for slot in scene.pool.slots if slot.role == "renderer"}
    beats = [msgspec.json.decode(data, type=Heartbeat) for data in await bus.read_heartbeats()]
    return [beat for beat in beats if beat.pid in pids]


def _num_read(scene: Scene, road: str, since: float) -> int:
    return sum(
        isinstance(event, Did) and event.what == f"read by {road}" and event.t > since
        for file in (scene.folder / "workers").glob("engine-*.jsonl")
        for event in read_events(file)
    )
