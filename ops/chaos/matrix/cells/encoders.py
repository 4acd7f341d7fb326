"""Cells about encoders, which stop, or die with embeddings that no engine has read.

The requests have images, clips and sounds in turn.
"""

import asyncio
import base64
import io
import secrets
import signal

import numpy as np
import soundfile
from PIL import Image

from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.cells.common import WORKER_S, count_answers, new_id, stopped, wait_for_load
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.plan import MODEL
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import LogRecord
from shared.protocol.requests import (
    SEQUENCE_HEAD,
    AudioPart,
    AudioURL,
    ContentPart,
    ImagePart,
    ImageURL,
    TextPart,
    VideoPart,
    VideoURL,
)
from shared.protocol.sampling import SamplingParams

AWAY_S = 4.0
NUM_REQUESTS = 6


@cell(
    "encoder: all of them stopped",
    "kill -STOP of all, 4 s",
    "5 s meanwhile",
    on="encoders",
    load_s=14,
)
async def all_away(deployment: Deployment) -> None:
    """Stop all encoders. Text is answered meanwhile, and requests with images afterwards."""
    await wait_for_load(deployment)
    async with deployment.bus("away") as bus:
        with stopped(deployment, "encoder"):
            tasks = _send_new_images(deployment, bus)
            await deployment.probe("beside_away", WORKER_S)
            await asyncio.sleep(AWAY_S)
        count_answers(deployment, "shown", await asyncio.gather(*tasks, return_exceptions=True))
    await deployment.probe("after_away", WORKER_S)


@cell(
    "encoder: an embedding is lost",
    "kill -9 of all when it is published, before an engine has read it",
    "computed again",
    on="encoders",
    load_s=14,
)
async def embedding_lost(deployment: Deployment) -> None:
    await wait_for_load(deployment)
    async with deployment.bus("lost") as bus:
        with stopped(deployment, "engine"):
            tasks = _send_new_images(deployment, bus)
            await _until_encoded(bus)
            for slot in deployment.slots_of("encoder"):
                deployment.signal(slot, "kill", signal.SIGKILL)
        count_answers(deployment, "shown", await asyncio.gather(*tasks, return_exceptions=True))
    await deployment.probe("after_lost", WORKER_S)


async def _until_encoded(bus: Bus) -> None:
    """Wait until the queue of the encoders is empty."""
    durable = subjects.stage_consumer("encoder", MODEL, "interactive")
    await asyncio.sleep(1.0)
    async with asyncio.timeout(20):
        while True:
            backlog = await bus.figures.depth(subjects.STAGES_STREAM, durable)
            if not backlog.num_pending and not backlog.num_in_flight:
                return
            await asyncio.sleep(0.1)


def _send_new_images(deployment: Deployment, bus: Bus) -> "list[asyncio.Task[list[LogRecord]]]":
    tasks = []
    for number in range(NUM_REQUESTS):
        content: list[ContentPart] = [_new_part(number), TextPart("What is it?")]
        id, sampling = new_id(f"shown-{number}"), SamplingParams(max_tokens=8)
        answer = deployment.ask(bus, id, sampling, content, timeout_s=60.0)
        tasks.append(asyncio.create_task(answer))
    return tasks


def _new_part(number: int) -> ContentPart:
    """Return a medium that no worker has cached."""
    file = io.BytesIO()
    if number % 3 == 2:
        noise = np.random.default_rng().uniform(-0.5, 0.5, 8_000)
        soundfile.write(file, noise, 16_000, format="WAV")
        return AudioPart(AudioURL(f"data:audio/wav;base64,{_base64(file)}"))
    form = "JPEG" if number % 3 else "PNG"
    Image.new("RGB", (100 + number, 90), "red").save(file, form)
    # Bytes after the end of an image file make another file.
    file.write(secrets.token_bytes(9))
    if form == "PNG":
        return ImagePart(ImageURL(f"data:image/png;base64,{_base64(file)}"))
    return VideoPart(VideoURL(f"{SEQUENCE_HEAD.decode()}{_base64(file)},{_base64(file)}"))


def _base64(file: io.BytesIO) -> str:
    return base64.b64encode(file.getvalue()).decode()
