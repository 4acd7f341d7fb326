"""Tasks for renderers, and a sink that receives their results in place of the engine."""

import asyncio
import base64
import io

import numpy as np
from PIL import Image

from shared import client
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.codec import envelope
from shared.protocol import subjects
from shared.protocol.requests import ImagePart, ImageURL, Message, Prompt, TextPart
from shared.protocol.task_messages import EngineBody, RenderBody, RequestTicket, Task, TaskHeader

MODEL = "demo"
SIZE = (448, 448)


def question(seed: int) -> list[Message]:
    """Return a request about an image that no other seed has."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    image = Image.fromarray(corners).resize(SIZE, Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [Message("user", [ImagePart(ImageURL(url)), TextPart("What is it?")])]


async def send_task(bus: Bus, messages: list[Message], receipt: str = "$JS.ACK.none") -> str:
    """Publish a task to render, and return the request's id.

    A worker that ends the request confirms it by the receipt, to a queue that has no such request.
    """
    now_ms = bus.now_ms()
    request_id = client.new_request_id()
    # No coordinator asked for this task, so that no request is stored for it.
    ticket = RequestTicket(now_ms, now_ms + 600_000, 1, receipt)
    header = TaskHeader(request_id, MODEL, subjects.LANES[0], ticket)
    data = envelope.encode(Task(header, RenderBody(Prompt(messages))), [])
    subject = subjects.stage("renderer", MODEL, header.lane, request_id)
    await bus.publish(subject, data, request_id)
    return request_id


class Sink:
    """Render by the main path, and receive the result."""

    def __init__(self, bus: Bus, inbox: Consumer) -> None:
        self._bus = bus
        self._inbox = inbox

    @classmethod
    async def open(cls, bus: Bus) -> "Sink":
        lane = subjects.LANES[0]
        durable = subjects.stage_consumer("engine", MODEL, lane)
        where = subjects.stage_filter("engine", MODEL, lane)
        return cls(bus, await bus.queues.consume(subjects.STAGES_STREAM, durable, where, 32, 30.0))

    async def ask(self, messages: list[Message]) -> None:
        await self.send(messages)
        await self.take()

    async def send(self, messages: list[Message]) -> str:
        """Publish a task, and return the request's id."""
        return await send_task(self._bus, messages)

    async def take(self) -> str:
        """Receive a result, and return its request's id."""
        async with asyncio.timeout(60):
            delivery = await self._inbox.next()
        await delivery.ack()
        task, _ = envelope.decode(delivery.data, Task[EngineBody])
        return task.header.request_id
