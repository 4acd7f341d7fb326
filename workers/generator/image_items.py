"""Parts of a model that paints in separate stages, which the stage that paints calls by item tasks.

A task is named by its content, so a worker that takes over a request finds the results for the
worker before it, and requests with equal texts share a task.
"""

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

from shared.bus.bus import Bus
from shared.client import MAX_MEDIA_BYTES
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.errors import BlobLost, EncodingFailed
from shared.protocol.multimodal import content_hash
from shared.protocol.pipeline import Edge
from shared.protocol.task_messages import ItemResult, LatentsBody, Task, TaskBody, TextsBody
from shared.stage import tasks
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Abandoned, Done, Outcome
from shared.state import item_results, media_store
from workers.generator.core.denoising import Condition, ImageModel, Size
from workers.generator.image_parts import Caller, ThreadFiles
from workers.generator.image_thread import Encode, ImageThread
from workers.generator.input_images import InputImages
from workers.generator.text_store import TextStore
from workers.generator.worker import GeneratorWorker

MAX_CLAIMED = 2
"""Limit on tasks that a worker claims: one is computed, and one is next. More would wait in this
worker, although another one of the stage may be idle."""
MAX_LOSSES = 3
"""Limit on the results of one item task that may be lost, for one attempt at a request."""

T = TypeVar("T")


class _Head(Struct, frozen=True):
    """Head of a file with latents."""


class StageTexts:
    """Encoder of texts in a separate stage."""

    def __init__(self, bus: Bus, edge: Edge, store: TextStore, weights: str) -> None:
        """`weights` identifies the weights and their dtype."""
        self._bus, self._edge, self._store, self._weights = bus, edge, store, weights

    async def encode(self, caller: Caller, encode: Encode) -> list[Condition]:
        """Return the encoded texts. Raises RequestEnded and errors of the stage."""
        texts, urls = [*encode.texts], [*encode.urls]
        key = content_hash("texts", self._weights, encode.scope, *texts, "images", *urls)
        body = TextsBody(key, texts, encode.scope, caller.tenant, urls, caller.due_s)
        return await _result_of(
            self._bus, self._edge, caller, key, body, lambda: self._store.get(key)
        )


class StageFiles:
    """Decoder of latents in a separate stage."""

    def __init__(self, bus: Bus, edge: Edge) -> None:
        self._bus, self._edge = bus, edge

    async def store(
        self, caller: Caller, number: int, latents: TensorData, size: Size, fps: int | None
    ) -> str:
        """Store the image or the video of latents, and return its `media:` URL.

        Raises RequestEnded and errors of the stage.
        """
        request_id, tenant = caller.header.request_id, caller.tenant
        # The image has one decoding at a time, so these latents replace the ones of its previews.
        url = await media_store.store_url(
            self._bus, envelope.encode(_Head(), [latents]), tenant, f"{request_id} {number} latents"
        )
        key = content_hash("latents", request_id, number, url)
        body = LatentsBody(key, url, *size, fps, tenant, caller.due_s)

        async def get() -> str | None:
            result = await item_results.get(self._bus, key)
            return None if result is None or result.data is None else result.data.decode()

        return await _result_of(self._bus, self._edge, caller, key, body, get)


async def _result_of(
    bus: Bus,
    edge: Edge,
    caller: Caller,
    key: str,
    body: TaskBody,
    get: Callable[[], Awaitable[T | None]],
) -> T:
    """Return the result of an item task, which is published unless there is a result.

    It is published again if the result is lost. Raises EncodingFailed after several losses.
    """

    async def progress() -> None:
        caller.check()

    if (result := await get()) is not None:
        return result
    for _ in range(MAX_LOSSES):
        caller.check()
        nonce = secrets.token_hex(8)
        await tasks.publish_item(bus, edge, caller.header, key, body, (), nonce)
        with contextlib.suppress(BlobLost):
            return await item_results.wait(bus, key, get, progress)
    raise EncodingFailed(f"results of the stage {edge.target} were lost {MAX_LOSSES} times")


class TextWorker(GeneratorWorker):
    """Encodes texts for stages that paint."""

    body, max_claimed = TextsBody, MAX_CLAIMED

    def __init__(
        self,
        context: Context,
        model: str,
        thread: ImageThread,
        image_model: ImageModel,
        store: TextStore,
    ) -> None:
        super().__init__(context, model, thread)
        self._thread, self._store = thread, store
        self._images = InputImages(context.bus, context.config.renderer, image_model)

    async def _handle(self, task: Task[TextsBody], _: list[TensorData], job: Job) -> Outcome:
        body, expires_ms = task.body, task.header.expires_ms
        if await self._store.find_again(body.key):
            return Done()
        if self._context.bus.now_ms() >= expires_ms:
            return Abandoned()
        images = await self._images.read(body.images, body.tenant)
        encode = Encode(tuple(body.texts), body.scope, tuple(body.images), images)
        texts = await self._thread.encode(task.header.request_id, encode, body.due_s)
        await self._store.put(body.key, texts, expires_ms)
        return Done()


class LatentsWorker(GeneratorWorker):
    """Decodes latents for stages that paint, and stores the files."""

    body, max_claimed = LatentsBody, MAX_CLAIMED

    def __init__(self, context: Context, model: str, thread: ImageThread) -> None:
        super().__init__(context, model, thread)
        self._files = ThreadFiles(context.bus, thread)

    async def _handle(self, task: Task[LatentsBody], _: list[TensorData], job: Job) -> Outcome:
        body, header, bus = task.body, task.header, self._context.bus
        name = media_store.parse_media_url(body.latents)
        data = name and await media_store.find(bus, name, MAX_MEDIA_BYTES, body.tenant)
        # An image with later latents replaces these. They are also needless after the deadline.
        if not data or bus.now_ms() >= header.expires_ms:
            return Abandoned()
        caller = Caller(header, body.tenant, body.due_s, lambda: None)
        (latents,) = envelope.decode(data, _Head)[1]
        size = body.width, body.height
        url = await self._files.store(caller, 0, latents, size, body.fps)
        await item_results.publish(bus, body.key, ItemResult(data=url.encode()))
        return Done()
