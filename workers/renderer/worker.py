"""Renderer: a conversation with pictures becomes token ids and multimodal items for the engine."""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from shared.blobs.store import Blobs
from shared.bus.consumer import Delivery
from shared.codec import envelope
from shared.errors import DecodeError
from shared.protocol import subjects
from shared.protocol.messages import EngineTask, RenderTask
from shared.stage.loop import serve
from shared.stage.runtime import Context
from shared.stage.stage import Job
from shared.telemetry.logs import Logger
from workers.renderer import warmup
from workers.renderer.media.loader import MediaLoader, is_remote
from workers.renderer.media.request_media import RequestMedia
from workers.renderer.preview_path import PreviewPath
from workers.renderer.processing import prompt
from workers.renderer.processing.processor import Processor
from workers.renderer.render_path import RenderPath
from workers.renderer.rpc import RendererRpc
from workers.renderer.threads import Args, Result

_decode_task = msgspec.msgpack.Decoder(RenderTask).decode


async def main(context: Context) -> None:
    worker = RendererWorker(context, await context.open_blobs())
    await worker.load()
    # What the libraries leave behind is for good. A full collection would walk through it all, some
    # tenths of a second in the middle of somebody's request.
    gc.collect()
    gc.freeze()
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
        limits = self._config.renderer
        self._threads = ThreadPoolExecutor(limits.threads, "render")
        self._loader = MediaLoader(limits)
        self._main_path = RenderPath(context.bus, blobs, self._config, self._in_thread)
        self._readonly_path = PreviewPath(context.bus, self._loader, limits, self._in_thread)

    async def load(self) -> None:
        for name, model in self._config.models.items():
            processor = self._processors[name] = await self._in_thread(Processor, model)
            await self._warm_up(name, processor)

    async def _warm_up(self, model: str, processor: Processor) -> None:
        media = self._open_media("warm-up", 0)
        log = self._context.log.bind(model=model)
        with self._timed(log.bind(path="main")):
            await warmup.warm_up_render_path(self._main_path, processor, media)
        with self._timed(log.bind(path="readonly")):
            await warmup.warm_up_preview_path(self._readonly_path, processor)

    @contextlib.contextmanager
    def _timed(self, log: Logger) -> Iterator[None]:
        began_ms = self._context.bus.now_ms()
        try:
            yield
        except Exception:
            # The first request will be slow, and no worse.
            log.warning("warm_up_failed", exc_info=True)
        else:
            log.info("warmed_up", ms=round(self._context.bus.now_ms() - began_ms))

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
        await context.bus.watch_subjects(subjects.ENDED_FILTER, self._note_ended)
        services = RendererRpc(
            context.bus, self._readonly_path, self._processors, config, self._in_thread
        )
        await services.start()
        counters = self._main_path.images.counters
        context.metrics.set_function("mm_cache_queries_total", lambda: counters.queries)
        context.metrics.set_function("mm_cache_hits_total", lambda: counters.hits)
        context.ready(
            sorted(self._processors),
            lambda: {
                "held": sum(c.num_in_flight for c in consumers),
                "mm_cache_hits": counters.hits,
                "pictures_processed": counters.processed,
            },
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(services.run(context.shutdown.asked, config.delivery.drain_s))
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
            if await stage.claim(job) is None:
                return
            self._in_hand.add(task.request_id)
            job.waiting = True
            data = await self._render(task, job)
            metrics = self._context.metrics.of(task.model)
            rendered_s = (self._context.bus.now_ms() - job.received_ms) / 1000
            metrics.histogram("render_seconds").observe(rendered_s)
            # The threads are free for what waits in this worker.
            stage.progressed(stage.waiting)
            if task.request_id in self._ended:
                await stage.finish(job)
                return
            await stage.forward(job, "engine", task.model, task.lane, data, task.round)
            metrics.counter("rendered_requests_total").add()
            self._context.log.info(
                "rendered",
                request_id=task.request_id,
                attempt=delivery.attempt,
                bytes=len(data),
                ms=round(self._context.bus.now_ms() - job.received_ms, 1),
            )
        except asyncio.CancelledError:
            await stage.requeue(job)
            raise
        except Exception as error:
            await stage.fail(job, error)
        finally:
            self._in_hand.discard(job.request_id)
            self._ended.discard(job.request_id)
            await stage.discard_outputs(job)

    async def _render(self, task: RenderTask, job: Job) -> bytes:
        def begun() -> None:
            job.waiting = False

        async def advanced() -> None:
            # Of the delivery that the job has by now.
            await job.delivery.progress()

        rendered = await self._main_path.render(
            self._processors[task.model],
            task.prompt,
            await self._media_of(task, job),
            (task.accepted.deadline_ms - self._context.bus.now_ms()) / 1000,
            task,
            job.outputs,
            begun,
            advanced,
        )
        engine_task = EngineTask(
            request_id=task.request_id,
            model=task.model,
            lane=task.lane,
            prompt_token_ids=rendered.prompt_token_ids,
            items=rendered.items,
            sampling_params=task.sampling_params,
            accepted=task.accepted,
            path=[*task.path, self._context.stage.span(job)],
            round=task.round,
            adapter=task.adapter,
        )
        return envelope.encode(engine_task, rendered.tensors)

    async def _media_of(self, task: RenderTask, job: Job) -> RequestMedia:
        accepted = task.accepted
        media = self._open_media(
            task.request_id, accepted.sequence, accepted.tenant, accepted.cache_scope, task.model
        )
        tried_before = job.delivery.attempt > 1 or task.round > 0
        urls = (part.url for part in prompt.media_parts(task.prompt.messages))
        if tried_before and any(is_remote(url) for url in urls):
            await media.recall()
        return media

    def _open_media(self, request_id: str, sequence: int, *whose: str) -> RequestMedia:
        limits = self._config.renderer
        return RequestMedia(
            self._context.bus, self._loader, limits, self._in_thread, request_id, sequence, *whose
        )

    async def _in_thread(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *args)


def _decode(data: bytes) -> RenderTask:
    try:
        return _decode_task(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a render task: {error}") from error
