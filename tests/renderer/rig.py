"""A renderer in this process, and the queues on both sides of it."""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig, RendererConfig
from shared.protocol import subjects
from shared.protocol.requests import ImagePart, ImageURL, Message, Prompt, TextPart
from shared.protocol.task_messages import EngineBody, RenderBody, RequestTicket, Task
from shared.stage.runtime import Context
from tests.support.workers import Announcement
from tests.tasks import render_task
from workers.renderer.worker import RendererWorker
from workers.settings import DEMO_MODEL

_sequences = itertools.count(1_000_000)


def config_for(model: str, **renderer: Any) -> Config:
    """Fetches from this machine; `model` is one of the test's own, so that its queues are too."""
    limits = {"media_hosts": ["127.0.0.1"], "media_networks": ["127.0.0.0/8"]} | renderer
    return Config(
        nats=NatsConfig(unchecked=True),  # as the bus of a test, which need not wait either
        models={model: ModelConfig(str(Path(DEMO_MODEL)))},
        delivery=DeliveryConfig(ack_wait_s=1.0, retry_delay_s=0.1, drain_s=2.0),
        renderer=RendererConfig(**limits),
    )


def new_model() -> str:
    return f"m-{secrets.token_hex(4)}"


def messages_with(urls: Sequence[str], text: str = "What is it?") -> list[Message]:
    return [Message("user", [*(ImagePart(ImageURL(url)) for url in urls), TextPart(text)])]


def task_for(
    bus: Bus, model: str, prompt: list[Message] | Prompt, tenant: str = "", salt: str = ""
) -> Task[RenderBody]:
    now_ms, sequence = bus.now_ms(), next(_sequences)
    ticket = RequestTicket(now_ms, now_ms + 60_000, sequence, "$JS.ACK.none", tenant, salt)
    request_id = f"t-{secrets.token_hex(6)}"
    prompt = Prompt(prompt) if isinstance(prompt, list) else prompt
    return render_task(request_id, prompt, model=model, ticket=ticket)


async def publish(bus: Bus, task: Task[RenderBody]) -> None:
    header = task.header
    subject = subjects.stage("renderer", header.model, header.lane, header.request_id)
    await bus.publish(subject, envelope.encode(task, []), secrets.token_hex(8))


class Sink:
    """Stands in for the engine of a model and receives its tasks."""

    def __init__(self, inbox: Consumer) -> None:
        self._inbox = inbox

    @classmethod
    async def open(cls, bus: Bus, model: str) -> "Sink":
        return cls(
            await bus.consume(
                subjects.STAGES_STREAM,
                subjects.stage_consumer("engine", model, "interactive"),
                subjects.stage_filter("engine", model, "interactive"),
                8,
                30.0,
            )
        )

    async def next(self, timeout_s: float = 20.0) -> tuple[EngineBody, list[TensorData]]:
        task, tensors = await self.next_task(timeout_s)
        return task.body, tensors

    async def next_task(self, timeout_s: float = 20.0) -> tuple[Task[EngineBody], list[TensorData]]:
        delivery = await asyncio.wait_for(self._inbox.next(), timeout_s)
        await delivery.ack()
        return envelope.decode(delivery.data, Task[EngineBody])


@contextlib.asynccontextmanager
async def renderer(url: str, config: Config) -> AsyncIterator[RendererWorker]:
    """One that serves."""
    name = f"renderer-{secrets.token_hex(4)}"
    bus = await Bus.connect(url, name)
    await bus.prepare(config.nats, config.delivery)
    context = Context("renderer", name, None, config, bus, structlog.get_logger())
    worker = RendererWorker(context, await context.open_blobs())
    await worker.load()
    announced = Announcement(context)
    serving = asyncio.create_task(worker.serve())
    await announced.wait()
    try:
        yield worker
    finally:
        context.shutdown.signal()
        await serving
        await context.close()
        await bus.close()
