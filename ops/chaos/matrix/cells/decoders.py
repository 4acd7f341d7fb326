"""Cells about decoders: the processes in which a renderer decodes videos are killed."""

import asyncio
import base64
import io
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.cells.common import WORKER_S, new_id
from ops.chaos.matrix.deployment import Deployment
from shared import client
from shared.bus.bus import Bus
from shared.protocol.records import Finish, TokenChunk
from shared.protocol.requests import SEQUENCE_HEAD, ContentPart, TextPart, VideoPart, VideoURL
from shared.protocol.sampling import SamplingParams
from workers.renderer.decoding.pool import SPAWNER

NUM_VIDEOS = 12
# The model that hears has 768 tokens for two large frames, and its context is 2,048.
NUM_FRAMES = 2
# Decoding such an image takes tens of milliseconds, so that there is time to kill its decoder.
SIZE = (2800, 2100)
POLL_S = 0.001
KILLED_SHARE = 0.5
KILL_SPAWNER_EACH = 4


@cell(
    "renderer: decoders killed",
    "kill -9 of half of the decoders of videos, or of the process that forks them",
    "the same tokens",
    on="encoders",
    load_s=14,
)
async def decoders_killed(deployment: Deployment) -> None:
    """Kill many decoders, and now and then the process that forks them.

    The answers must equal the answers about the same videos, under other hashes, without kills.
    """
    async with deployment.bus("decoders") as bus:
        expected = await _ask(deployment, bus, "calm")
        killing = asyncio.create_task(_kill_decoders(deployment))
        try:
            answers = await _ask(deployment, bus, "killed")
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
    for number, (calm, killed) in enumerate(zip(expected, answers, strict=True)):
        if calm is None or killed is None:
            deployment.note(f"I10: the request with video {number} failed")
        elif calm != killed:
            deployment.note(f"I3: with killed decoders, the answer to video {number} differs")
    if not deployment.outcome.figures.get("killed"):
        deployment.note("no decoder was killed")
    await deployment.probe("after_kills", WORKER_S)


async def _ask(deployment: Deployment, bus: Bus, nonce: str) -> Sequence[list[int] | None]:
    """Return the tokens of the answers about all videos, None for one that failed."""
    answers = (_answer(deployment, bus, number, nonce) for number in range(NUM_VIDEOS))
    return await asyncio.gather(*answers)


async def _answer(deployment: Deployment, bus: Bus, number: int, nonce: str) -> list[int] | None:
    url = await client.pin_media(bus, _make_video(number, nonce.encode()))
    content: list[ContentPart] = [VideoPart(VideoURL(url)), TextPart("What color is it?")]
    sampling, id = SamplingParams(max_tokens=8, temperature=0.0), new_id(f"{nonce}-{number}")
    *chunks, end = await deployment.ask(bus, id, sampling, content, timeout_s=60.0)
    choices = [c for chunk in chunks if isinstance(chunk, TokenChunk) for c in chunk.choices]
    token_ids = [token_id for choice in choices for token_id in choice.token_ids]
    return token_ids if isinstance(end, Finish) else None


def _make_video(number: int, nonce: bytes) -> bytes:
    """Return a sequence of JPEG files; the nonce changes its hash and not its pixels."""
    files = []
    for frame in range(NUM_FRAMES):
        file = io.BytesIO()
        color = (30 * number % 256, 40 * frame % 256, 60 + 20 * number % 190)
        Image.new("RGB", SIZE, color).save(file, "JPEG")
        files.append(base64.b64encode(file.getvalue() + nonce))
    return SEQUENCE_HEAD + b",".join(files)


async def _kill_decoders(deployment: Deployment) -> None:
    """Kill some of the decoders that run, and at times the process that forks them."""
    figures = deployment.outcome.figures
    decoders: set[int] = set()
    while True:
        for slot in deployment.slots_of("renderer"):
            for spawner in filter(_is_spawner, _children(slot.pid)):
                for decoder in _children(spawner):
                    if decoder in decoders:
                        continue
                    decoders.add(decoder)
                    if deployment.rng.random() > KILLED_SHARE:
                        continue
                    each = int(figures.get("killed", 0)) % KILL_SPAWNER_EACH
                    with suppress(ProcessLookupError):
                        os.kill(spawner if not each else decoder, signal.SIGKILL)
                        figures["killed"] = figures.get("killed", 0) + 1
        await asyncio.sleep(POLL_S)


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    pids = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def _is_spawner(pid: int) -> bool:
    with suppress(OSError):
        return SPAWNER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
