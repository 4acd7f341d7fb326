"""Renderer: a conversation with pictures becomes token ids and multimodal items for the engine."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

import msgspec

from shared import codec, parcels, subjects
from shared.blobs import Blobs
from shared.codec import TensorData
from shared.consumer import Delivery
from shared.errors import DecodeError
from shared.messages import EngineTask, RenderTask
from shared.multimodal import MultiModalKwargsItem
from shared.runtime import Context
from shared.stage import Job, serve
from workers.renderer import prompt
from workers.renderer.images import LoadedImage
from workers.renderer.media import MediaLoader
from workers.renderer.processor import Processor, Rendered

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

_decode_task = msgspec.msgpack.Decoder(RenderTask).decode


async def main(context: Context) -> None:
    worker = RendererWorker(context, await context.open_blobs())
    await worker.load()
    await worker.serve()


class RendererWorker:
    """Owns the processors of all models and the threads in which they work."""

    def __init__(self, context: Context, blobs: Blobs) -> None:
        self._context = context
        self._config = context.config
        self._processors: dict[str, Processor] = {}
        self._media = MediaLoader(self._config.renderer)
        self._in_hand: set[str | None] = set()
        self._ended: set[str | None] = set()
        """Of these, the ones that somebody has ended meanwhile."""
        self._blobs = blobs
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
                subjects.stage_filter(context.role, model, lane),
                config.renderer.concurrency,
                config.delivery.ack_wait_s,
            )
            for model in self._processors
            for lane in subjects.LANES
        ]
        await context.bus.watch(subjects.ENDED_FILTER, self._note_ended)
        context.ready(sorted(self._processors), lambda: {"held": sum(c.held for c in consumers)})
        async with asyncio.TaskGroup() as group:
            for consumer in consumers:
                group.create_task(
                    serve(consumer, self._handle, context.shutdown, config.delivery.drain_s)
                )
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_ended(self, subject: str) -> None:
        request_id = subjects.last_token(subject)
        if request_id in self._in_hand:
            self._ended.add(request_id)

    async def _handle(self, delivery: Delivery) -> None:
        stage = self._context.stage
        job = stage.receive(delivery)
        if job is None:
            return
        try:
            task = _decode(delivery.data)
            job.identify(task)
            if await stage.take(job) is None:
                return
            self._in_hand.add(task.request_id)
            job.waiting = True
            data = await self._render(task, job)
            # The threads are free for what waits in this worker.
            stage.progressed(stage.waiting)
            if task.request_id in self._ended:
                await stage.finish(job)
                return
            await stage.hand_over(job, "engine", task.model, task.lane, data, task.round)
            self._context.log.info(
                "rendered",
                request_id=task.request_id,
                attempt=delivery.attempt,
                bytes=len(data),
                ms=round(self._context.bus.now_ms() - job.received_ms, 1),
            )
        except asyncio.CancelledError:
            await stage.hand_back(job)
            raise
        except Exception as error:
            await stage.fail(job, error)
        finally:
            self._in_hand.discard(job.request_id)
            self._ended.discard(job.request_id)

    async def _render(self, task: RenderTask, job: Job) -> bytes:
        processor = self._processors[task.model]
        loop = asyncio.get_running_loop()

        def render() -> Rendered:
            job.waiting = False
            return processor.render(task.messages, load_images())

        def load_images() -> Iterator[LoadedImage]:
            # One at a time, and dropped once it is processed: eight rasters of the largest size
            # would be a gigabyte.
            for field, part in prompt.image_parts(task.messages):
                yield self._media.load(part.image_url.url, field)
                asyncio.run_coroutine_threadsafe(job.delivery.progress(), loop)

        rendered = await self._in_thread(render)
        items, tensors = self._detach(task, rendered)
        engine_task = EngineTask(
            request_id=task.request_id,
            model=task.model,
            lane=task.lane,
            prompt_token_ids=rendered.prompt_token_ids,
            items=items,
            sampling_params=task.sampling_params,
            accepted=task.accepted,
            path=[*task.path, self._context.stage.hop(job)],
            round=task.round,
        )
        return codec.encode(engine_task, tensors)

    def _detach(
        self, task: RenderTask, rendered: Rendered
    ) -> tuple[list[MultiModalKwargsItem], list[TensorData]]:
        """What is large goes beside the message. If there is no room it goes inside after all."""
        num_bytes = sum(tensor.data.nbytes for tensor in rendered.tensors)
        if num_bytes <= self._config.blobs.inline_kib * 2**10:
            return rendered.items, rendered.tensors
        ttl_s = (task.accepted.deadline_ms - self._context.bus.now_ms()) / 1000
        detached = parcels.detach(self._blobs, rendered.items, rendered.tensors, ttl_s)
        if detached is None:
            self._context.log.warning("arena_full", request_id=task.request_id, bytes=num_bytes)
            return rendered.items, rendered.tensors
        return detached, []

    async def _in_thread(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *args)


def _decode(data: bytes) -> RenderTask:
    try:
        return _decode_task(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a render task: {error}") from error
