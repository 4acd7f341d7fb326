"""Renderer: a conversation with pictures becomes token ids and multimodal items for the engine."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

import msgspec

from shared import codec, subjects
from shared.consumer import Delivery
from shared.errors import DecodeError
from shared.messages import EngineTask, RenderTask
from shared.runtime import Context
from shared.stage import now_ms, serve
from workers.renderer import prompt
from workers.renderer.images import LoadedImage, fetch_image
from workers.renderer.processor import Processor

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

_decode_task = msgspec.msgpack.Decoder(RenderTask).decode


async def main(context: Context) -> None:
    worker = RendererWorker(context)
    await worker.load()
    await worker.serve()


class RendererWorker:
    """Owns the processors of all models and the threads in which they work."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._config = context.config
        self._processors: dict[str, Processor] = {}
        self._threads = ThreadPoolExecutor(self._config.renderer.threads, "render")

    async def load(self) -> None:
        for name, model in self._config.models.items():
            self._processors[name] = await self._in_thread(Processor, model)

    async def serve(self) -> None:
        """One consumer per model and lane; all draw on the same threads."""
        config, context = self._config, self._context
        consumers = [
            await context.bus.consume(
                subjects.STAGES_STREAM,
                subjects.stage_consumer(context.role, model, lane),
                subjects.stage(context.role, model, lane),
                config.renderer.concurrency,
                config.delivery.ack_wait_s,
            )
            for model in self._processors
            for lane in subjects.LANES
        ]
        context.ready(sorted(self._processors), lambda: {"held": sum(c.held for c in consumers)})
        async with asyncio.TaskGroup() as group:
            for consumer in consumers:
                group.create_task(
                    serve(consumer, self._handle, context.stopping, config.delivery.drain_s)
                )
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, delivery: Delivery) -> None:
        received_ms = now_ms()
        stage = self._context.stage
        task: RenderTask | None = None
        try:
            # Before anything that the message could make fail: it must come to an end.
            if (exhausted := stage.exhausted(delivery)) is not None:
                raise exhausted
            task = _decode(delivery.data)
            log = self._context.log.bind(request_id=task.request_id, attempt=delivery.attempt)
            data = await self._render(task, delivery, received_ms)
            await stage.hand_over(delivery, task.request_id, "engine", task.model, task.lane, data)
            log.info("rendered", bytes=len(data), ms=round(now_ms() - received_ms, 1))
        except Exception as error:
            request_id = task.request_id if task else stage.request_id_of(delivery)
            path = [*(task.path if task else []), stage.hop(delivery, received_ms)]
            await stage.settle_failure(delivery, request_id, error, path)

    async def _render(self, task: RenderTask, delivery: Delivery, received_ms: float) -> bytes:
        processor = self._processors[task.model]
        loop = asyncio.get_running_loop()

        def load_images() -> Iterator[LoadedImage]:
            # One at a time, and dropped once it is processed: eight rasters of the largest size
            # would be a gigabyte.
            for field, part in prompt.image_parts(task.messages):
                yield fetch_image(part.image_url.url, self._config.renderer, field)
                asyncio.run_coroutine_threadsafe(delivery.progress(), loop)

        rendered = await self._in_thread(processor.render, task.messages, load_images())
        engine_task = EngineTask(
            request_id=task.request_id,
            model=task.model,
            lane=task.lane,
            prompt_token_ids=rendered.prompt_token_ids,
            items=rendered.items,
            sampling_params=task.sampling_params,
            accepted_ms=task.accepted_ms,
            path=[*task.path, self._context.stage.hop(delivery, received_ms)],
        )
        return codec.encode(engine_task, rendered.tensors)

    async def _in_thread(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *args)


def _decode(data: bytes) -> RenderTask:
    try:
        return _decode_task(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a render task: {error}") from error
