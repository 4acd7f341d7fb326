"""Cells about encoders: away all together, or dead with what they have just made."""

import asyncio
import base64
import io
import secrets
import signal

from PIL import Image

from ops.chaos.matrix.cells.common import WORKER_S, count_answers, lead_in, new_id, slots_of
from ops.chaos.matrix.cells.payloads import stopped
from ops.chaos.matrix.scene import Scene
from ops.chaos.plan import MODEL
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.messages import (
    GenerateRequest,
    ImagePart,
    ImageURL,
    LogRecord,
    Message,
    TextPart,
)
from shared.protocol.sampling import SamplingParams

AWAY_S = 4.0
NUM_ASKED = 6


async def all_away(scene: Scene) -> None:
    """Text goes on meanwhile, and what shows pictures is answered afterwards."""
    await lead_in(scene)
    async with scene.bus("away") as bus:
        with stopped(scene, "encoder"):
            asked = _ask_new_pictures(bus)
            await scene.probe("beside_away", WORKER_S)
            await asyncio.sleep(AWAY_S)
        count_answers(scene, "shown", await asyncio.gather(*asked, return_exceptions=True))
    await scene.probe("after_away", WORKER_S)


async def embedding_lost(scene: Scene) -> None:
    await lead_in(scene)
    async with scene.bus("lost") as bus:
        with stopped(scene, "engine"):
            asked = _ask_new_pictures(bus)
            await _until_encoded(bus)
            for slot in slots_of(scene, "encoder"):
                scene.signal(slot, "kill", signal.SIGKILL)
        count_answers(scene, "shown", await asyncio.gather(*asked, return_exceptions=True))
    await scene.probe("after_lost", WORKER_S)


async def _until_encoded(bus: Bus) -> None:
    """Nothing waits for encoders any more."""
    durable = subjects.stage_consumer("encoder", MODEL, "interactive")
    await asyncio.sleep(1.0)
    async with asyncio.timeout(20):
        while True:
            backlog = await bus.queue_depth(subjects.STAGES_STREAM, durable)
            if not backlog.num_pending and not backlog.num_in_flight:
                return
            await asyncio.sleep(0.1)


def _ask_new_pictures(bus: Bus) -> "list[asyncio.Task[list[LogRecord]]]":
    return [asyncio.create_task(_ask(bus, number)) for number in range(NUM_ASKED)]


async def _ask(bus: Bus, number: int) -> list[LogRecord]:
    file = io.BytesIO()
    Image.new("RGB", (100 + number, 90), "red").save(file, "PNG")
    # Bytes behind a picture make another file of it, which nobody has seen.
    data = base64.b64encode(file.getvalue() + secrets.token_bytes(8)).decode()
    url = f"data:image/png;base64,{data}"
    message = Message("user", [ImagePart(ImageURL(url)), TextPart("What color is it?")])
    request = GenerateRequest(MODEL, [message], SamplingParams(max_tokens=8), timeout_s=60.0)
    return [record async for record in client.ask(bus, request, new_id(f"shown-{number}"))]
