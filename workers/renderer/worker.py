"""Renderer: a conversation with pictures becomes token ids and multimodal items for the engine."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar, TypeVarTuple

import msgspec

from shared import codec, parcels, subjects
from shared.blobs import Blobs
from shared.codec import TensorData
from shared.consumer import Delivery
from shared.errors import DecodeError, PayloadTooLarge, Unavailable
from shared.messages import EngineTask, RenderTask
from shared.multimodal import BlobRef, MultiModalKwargsItem, PlaceholderRange
from shared.runtime import Context
from shared.stage import Job, serve
from workers.renderer import prompt
from workers.renderer.media import MediaLoader
from workers.renderer.pictures import Pictures, Prepared
from workers.renderer.processor import Processor

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
        self._in_hand: set[str | None] = set()
        self._ended: set[str | None] = set()
        """Of these, the ones that somebody has ended meanwhile."""
        self._blobs = blobs
        limits = self._config.renderer
        self._threads = ThreadPoolExecutor(limits.threads, "render")
        self._pictures = Pictures(blobs, MediaLoader(limits), limits, self._in_thread)

    async def load(self) -> None:
        for name, model in self._config.models.items():
            processor = self._processors[name] = await self._in_thread(Processor, model)
            began_ms = self._context.bus.now_ms()
            try:
                await self._in_thread(processor.warm_up)
            except Exception:
                # The first request will be slow, and no worse.
                self._context.log.warning("warm_up_failed", model=name, exc_info=True)
                continue
            took_ms = round(self._context.bus.now_ms() - began_ms)
            self._context.log.info("warmed_up", model=name, ms=took_ms)

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
        counters = self._pictures.counters
        context.ready(
            sorted(self._processors),
            lambda: {
                "held": sum(c.held for c in consumers),
                "mm_cache_hits": counters.hits,
                "pictures_processed": counters.processed,
            },
        )
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
            await stage.take_back(job)

    async def _render(self, task: RenderTask, job: Job) -> bytes:
        processor = self._processors[task.model]
        token_ids = await self._in_thread(self._begin, processor, task, job)
        ttl_s = (task.accepted.deadline_ms - self._context.bus.now_ms()) / 1000
        prepared = []
        # One at a time, and dropped once it is processed: eight rasters of the largest size would
        # be a gigabyte.
        for field, part in prompt.image_parts(task.messages):
            picture = await self._pictures.prepare(processor, part.image_url.url, field, ttl_s)
            prepared.append(picture)
            if picture.ref is not None:
                job.outputs.append(picture.ref)
            await job.delivery.progress()
        counts = [picture.num_tokens for picture in prepared]
        token_ids, ranges = await self._in_thread(processor.expand, token_ids, counts)
        items, tensors = await self._pack(job, prepared, ranges)
        engine_task = EngineTask(
            request_id=task.request_id,
            model=task.model,
            lane=task.lane,
            prompt_token_ids=token_ids,
            items=items,
            sampling_params=task.sampling_params,
            accepted=task.accepted,
            path=[*task.path, self._context.stage.hop(job)],
            round=task.round,
        )
        data = codec.encode(engine_task, tensors)
        self._check_room(data, prepared)
        return data

    def _check_room(self, data: bytes, prepared: Sequence[Prepared]) -> None:
        """What finds no room in the arena goes with the message. Raises PayloadTooLarge when that
        is too large, or Unavailable when there will be room once others have ended."""
        try:
            self._context.bus.check_size(data, "the engine")
        except PayloadTooLarge:
            homeless = any(picture.ref is None for picture in prepared)
            if not homeless or _num_bytes(prepared) > self._blobs.capacity:
                raise
            raise Unavailable("there is no room for its pictures at present") from None

    @staticmethod
    def _begin(processor: Processor, task: RenderTask, job: Job) -> list[int]:
        job.waiting = False
        return processor.tokenize(task.messages)

    async def _pack(
        self, job: Job, prepared: Sequence[Prepared], ranges: Sequence[PlaceholderRange]
    ) -> tuple[list[MultiModalKwargsItem], list[TensorData]]:
        """Large pictures stay where they are, small ones go into the message."""
        items: list[MultiModalKwargsItem] = []
        tensors: list[TensorData] = []
        num_bytes = sum(p.ref.num_bytes for p in prepared if p.ref is not None)
        inline = num_bytes <= self._config.blobs.inline_kib * 2**10
        for picture, placeholder in zip(prepared, ranges, strict=True):
            ref, fields = picture.ref, picture.fields
            if ref is not None and inline:
                fields = fields or await self._copy(ref)
                await self._blobs.release(ref)
                job.outputs.remove(ref)
                ref = None
            if ref is not None:
                item = MultiModalKwargsItem("image", picture.mm_hash, placeholder, blob=ref)
            else:
                indexes = {name: len(tensors) + i for i, name in enumerate(fields)}
                item = MultiModalKwargsItem("image", picture.mm_hash, placeholder, indexes)
                tensors += fields.values()
            items.append(item)
        return items, tensors

    async def _copy(self, ref: BlobRef) -> dict[str, TensorData]:
        with await self._blobs.get(ref) as blob:
            fields, _ = parcels.read(blob)
            return {
                name: replace(tensor, data=memoryview(bytes(tensor.data)))
                for name, tensor in fields.items()
            }

    async def _in_thread(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *args)


def _num_bytes(prepared: Sequence[Prepared]) -> int:
    return sum(
        picture.ref.num_bytes if picture.ref is not None else parcels.num_bytes(picture.fields)
        for picture in prepared
    )


def _decode(data: bytes) -> RenderTask:
    try:
        return _decode_task(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a render task: {error}") from error
