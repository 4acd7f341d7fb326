"""Renderer: turns a conversation with images into token ids and multimodal items."""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from shared.blobs.store import Blobs
from shared.codec.envelope import TensorData
from shared.models.lazy_module import load_torch
from shared.protocol import subjects
from shared.protocol.messages import rendered_tasks, rendered_tokens
from shared.protocol.multimodal import AUDIO, VIDEO
from shared.protocol.pipeline import models_of
from shared.protocol.requests import Prompt, TextPart
from shared.protocol.task_messages import EngineBody, RenderBody, Task, TaskHeader
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Ended, Forward, Outcome, WorkerLoop
from workers.renderer.detour import Detours
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.media.loader import MediaLoader, is_remote
from workers.renderer.media.request_media import RequestMedia
from workers.renderer.preview_path import PreviewPath
from workers.renderer.processing.processor import Processor, Rendered
from workers.renderer.processing.prompt import parts_of
from workers.renderer.render_path import RenderPath
from workers.renderer.rpc import RendererRpc
from workers.renderer.sound_splitter import SoundSplitter
from workers.renderer.threads import Args, Result
from workers.renderer.warmup import MAX_BYTES, TTL_S, warm_up


async def main(context: Context) -> None:
    worker = RendererWorker(context, await context.open_blobs())
    context.log_sandbox()
    await worker.load()
    # The objects of libraries live as long as the process. A full collection would visit all of
    # them, which takes tenths of a second in the middle of a request.
    gc.collect()
    gc.freeze()
    await worker.serve()


class RendererWorker:
    """Owns the processors of all models and the threads in which they run."""

    def __init__(self, context: Context, blobs: Blobs) -> None:
        self._context = context
        self._config = context.config
        self.processors: dict[str, Processor] = {}
        limits = self._config.renderer
        self._threads = ThreadPoolExecutor(limits.threads, "render")
        self._text_threads = ThreadPoolExecutor(limits.threads, "text")
        self._loader = MediaLoader(limits, self._in_thread)
        self._decoders = MediaDecoders(limits, self._in_thread)
        self.render_path = RenderPath(
            context.bus,
            blobs,
            self._config,
            self._decoders,
            self._in_thread,
            self._in_text_thread,
        )
        models = models_of(context.pipelines, context.stage.name)
        self._detours = Detours(context, models)
        self._rendered = Counter[str]()
        """Counts for heartbeats: rendered tasks and their prompt tokens, by model."""
        self.preview_path = PreviewPath(
            context.bus, self._loader, limits, self._decoders, self._in_thread
        )

    async def load(self) -> None:
        for name in models_of(self._context.pipelines, self._context.stage.name):
            model = self._config.models[name]
            self._context.step(f"loading the processor of {name}")
            processor = self.processors[name] = await self._in_thread(Processor, model)
            self._context.step(f"warming up {name}")
            if any(map(processor.accepts, (VIDEO, AUDIO))):
                self._decoders.start()
            if processor.accepts(AUDIO):
                await self._in_thread(load_torch)
            await self._warm_up(name, processor)

    async def _warm_up(self, model: str, processor: Processor) -> None:
        media = self._open_media("warm-up", 0)
        render = partial(
            self.render_path.render, processor, media=media, ttl_s=TTL_S, header=None, refs=[]
        )
        preview = partial(self.preview_path.render, processor, max_bytes=MAX_BYTES)
        for path, way in (("render", render), ("preview", preview)):
            log = self._context.log.bind(model=model, path=path)
            began_ms = self._context.bus.now_ms()
            try:
                await warm_up(processor, way)
            except Exception:
                # The first request will be slow, which is the only consequence.
                log.warning("warm_up_failed", exc_info=True)
            else:
                log.info("warmed_up", ms=round(self._context.bus.now_ms() - began_ms))
        self.render_path.images.clear()

    async def serve(self) -> None:
        """Serve all models; they share the same threads."""
        config, context = self._config, self._context
        loop = WorkerLoop(context)
        await loop.add_stage(self.processors, config.renderer.concurrency, RenderBody, self._handle)
        await context.bus.watch_subjects(subjects.ENDED_FILTER, context.stage.claims.note_ended)
        rpc = RendererRpc(
            context.bus,
            self.preview_path,
            SoundSplitter(context.bus, self._decoders, config.renderer),
            self.processors,
            config,
            self._in_thread,
        )
        await rpc.start()
        counters = self.render_path.images.counters
        context.metrics.set_function("mm_cache_queries_total", lambda: counters.queries)
        context.metrics.set_function("mm_cache_hits_total", lambda: counters.hits)
        context.ready(
            sorted(self.processors),
            lambda: {
                "held": loop.num_claimed,
                "mm_cache_hits": counters.hits,
                "images_processed": counters.processed,
                **self._rendered,
            },
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._detours.run())
            group.create_task(rpc.run(context.shutdown.asked, config.delivery.drain_s))
            group.create_task(loop.run())
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self._decoders.close()
        await self._loader.close()

    async def _handle(self, task: Task[RenderBody], _: list[TensorData], job: Job) -> Outcome:
        header, stage = task.header, self._context.stage
        job.waiting = True
        rendered = await self._render(header, task.body.prompt, job)
        rendered_s = (self._context.bus.now_ms() - job.received_ms) / 1000
        metrics = self._context.metrics.of(header.model)
        metrics.histogram("render_seconds").observe(rendered_s)
        # The threads are now free for the jobs that wait in this worker.
        stage.claims.progressed(stage.claims.waiting)
        if job.ended:
            return Ended()
        metrics.counter("rendered_requests_total").add()
        self._rendered[rendered_tasks(header.model)] += 1
        self._rendered[rendered_tokens(header.model)] += len(rendered.prompt_token_ids)
        self._context.log.info(
            "rendered",
            request_id=header.request_id,
            attempt=job.delivery.attempt,
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )
        body = EngineBody(rendered.prompt_token_ids, rendered.items)
        detour = await self._detours.suits(header, body, job)
        return Forward(body, rendered.tensors, detour)

    async def _render(self, header: TaskHeader, prompt: Prompt, job: Job) -> Rendered:
        assert header.ticket is not None

        def begun() -> None:
            job.waiting = False

        async def advanced() -> None:
            # The job may have a new delivery by now.
            await job.delivery.progress()

        return await self.render_path.render(
            self.processors[header.model],
            prompt,
            await self._media_of(header, prompt, job),
            (header.ticket.deadline_ms - self._context.bus.now_ms()) / 1000,
            header,
            job.outputs,
            begun,
            advanced,
        )

    async def _media_of(self, header: TaskHeader, prompt: Prompt, job: Job) -> RequestMedia:
        ticket = header.ticket
        assert ticket is not None
        media = self._open_media(
            header.request_id, ticket.sequence, ticket.tenant, ticket.cache_scope, header.model
        )
        tried_before = job.delivery.attempt > 1 or header.round > 0
        urls = (part.url for _, part in parts_of(prompt.messages) if not isinstance(part, TextPart))
        if tried_before and any(is_remote(url) for url in urls):
            await media.recall()
        return media

    def _open_media(self, request_id: str, sequence: int, *whose: str) -> RequestMedia:
        limits = self._config.renderer
        return RequestMedia(self._context.bus, self._loader, limits, request_id, sequence, *whose)

    async def _in_thread(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *args)

    async def _in_text_thread(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Run short work on text, which must not wait for media of other requests."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._text_threads, function, *args)
