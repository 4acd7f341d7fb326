"""Image generator: paints images, or makes a video, from a text, by denoising steps.

The log of the images has everything that another generator needs to continue: the finished images,
and references to the stored states of unfinished images. Without a state, an image begins again
from its noise. The noise is a function of the seed, so the pixels are the same. A video is
treated as one image with frames.
"""

import asyncio
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from shared.client import MAX_MEDIA_BYTES
from shared.codec.envelope import TensorData
from shared.protocol import subjects
from shared.protocol.images import AUTO, PaintParams, parse_size
from shared.protocol.pipeline import IMAGE_KIND, VIDEO_KIND
from shared.protocol.records import OutputSummary
from shared.protocol.sampling import seed_of
from shared.protocol.task_messages import PaintBody, Task, TaskHeader
from shared.stage.inputs import RequestEnded
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.stage import SUSPECT_PAUSE_S
from shared.stage.worker_loop import Done, Ended, Outcome, Requeue
from shared.state import media_store
from shared.state.token_log import LogWriter
from workers.generator.core.denoising import (
    Condition,
    ImageModel,
    InputImage,
    Progress,
    Size,
    Step,
    Stepped,
    check_guidance,
    negative_of,
    noise_of,
    noise_shape_of,
    size_of,
)
from workers.generator.core.painting import Painting, decode_state, encode_state
from workers.generator.image_parts import Caller, Files, Texts, ThreadFiles, ThreadTexts
from workers.generator.image_results import ImageClaim, ImageResults, key_of
from workers.generator.image_thread import Encode, ImageThread
from workers.generator.input_images import InputImages
from workers.generator.worker import GeneratorWorker

FULL_PAUSE_S = 1.0
"""Average pause of a request that waits for an equal request while its worker is full."""
BATCH_LAG_S = 1e9
"""Lag of the batch lane: every interactive step is more urgent than all batch steps."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request in flight in this worker."""

    header: TaskHeader
    job: Job
    log: LogWriter
    params: PaintParams
    painting: Painting
    prompt: str
    num_tokens: int
    """Number of tokens of the prompt."""
    seed: int
    due_s: float
    images: tuple[InputImage, ...]
    """Images to edit."""
    size: Size
    appending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of the log, which the images of a request share: it accepts one append at a time."""
    has_ended: bool = False

    @property
    def tenant(self) -> str:
        return "" if self.header.ticket is None else self.header.ticket.tenant


class ImageWorker(GeneratorWorker):
    """Paints images. Each image is an asyncio task, and the thread computes its steps."""

    body = PaintBody

    def __init__(
        self,
        context: Context,
        model: str,
        thread: ImageThread,
        image_model: ImageModel,
        weights: str = "",
        results: ImageResults | None = None,
        texts: Texts | None = None,
        files: Files | None = None,
    ) -> None:
        """`weights` identifies the weights, the stage and the dtype, which affect the pixels.

        Without `results`, images are not cached. By default, the thread encodes texts and decodes
        latents.
        """
        super().__init__(context, model, thread)
        self._thread = thread
        self._image_model = image_model
        self._weights = weights
        self._results = results
        self._open: dict[str, _Open] = {}
        self._images = InputImages(context.bus, context.config.renderer, image_model)
        self._texts = texts or ThreadTexts(thread)
        self._files = files or ThreadFiles(context.bus, thread)

    def _register_metrics(self) -> None:
        metrics = self._context.metrics.of(self._model)
        metrics.set_function("image_steps_total", lambda: self._thread.num_steps)

    async def _handle(self, task: Task[PaintBody], _: list[TensorData], job: Job) -> Outcome:
        request = await self._opened(task, job)
        request_id, params = task.header.request_id, request.params
        self._open[request_id] = request
        try:
            is_painted = await self._paint_once(request)
        except RequestEnded:
            return Ended()
        except _NotWaiting as stopped:
            return Requeue(stopped.after_s)
        finally:
            del self._open[request_id]
        if not is_painted:
            return Requeue()
        self._context.log.info(
            "painted",
            request_id=request_id,
            attempt=job.delivery.attempt,
            images=params.n,
            frames=params.frames,
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )
        units: dict[str, float] = {
            "images" if params.frames is None else "frames": params.frames or params.n,
            "steps": params.n * params.steps,
            "prompt_tokens": request.num_tokens,
        }
        return Done(OutputSummary(units=units))

    async def _opened(self, task: Task[PaintBody], job: Job) -> _Open:
        """Open a request.

        Raises ContextTooLong for a text over the model's limit, InvalidRequest for a guidance
        without meaning or a negative prompt without effect, and errors of its images to edit.
        """
        header, model = task.header, self._image_model
        assert job.log is not None
        assert header.image is not None
        assert header.ticket is not None
        lag_s = 0.0 if header.lane == subjects.LANES[0] else BATCH_LAG_S
        params = header.image
        check_guidance(model, params)
        kind = IMAGE_KIND if params.frames is None else VIDEO_KIND
        # A text may be as long as a message. A thread keeps the event loop free for other requests.
        num_tokens = await asyncio.to_thread(model.check_text, task.body.text, "prompt")
        negative = params.negative_prompt
        await asyncio.to_thread(model.check_text, negative, f"{kind}.negative_prompt")
        images = await self._images.read(params.input_images, header.ticket.tenant)
        return _Open(
            header,
            job,
            job.log,
            params,
            Painting(params, job.log.records),
            task.body.text,
            num_tokens,
            seed_of(params.seed, header.request_id),
            header.ticket.accepted_ms / 1000 + lag_s,
            images,
            size_of(images[-1].for_latents) if params.size == AUTO else parse_size(params.size),
        )

    async def _paint_once(self, request: _Open) -> bool:
        """Append all images, which may come from an equal request. Returns False as `_paint` does.

        Raises RequestEnded and _NotWaiting.
        """
        header, results = request.header, self._results
        key = None if results is None else key_of(self._weights, header, request.prompt)
        if results is None or key is None:
            return await self._paint_all(request)
        # A waiting request cannot kill the worker, so it must not delay other suspects.
        request.job.suspect = False
        images_or_claim = await results.find_or_claim(
            key, header.request_id, lambda: self._check_waiting(request)
        )
        claim: ImageClaim | None
        if not isinstance(images_or_claim, list):
            claim = images_or_claim
        elif await self._append_stored(request, images_or_claim):
            self._context.metrics.of(self._model).counter("image_cache_hits_total").add()
            return True
        else:
            claim = await results.reclaim(key, header.request_id)
        if not self._context.stage.claims.may_begin(request.job):
            raise _NotWaiting(SUSPECT_PAUSE_S)
        if not await self._paint_all(request):
            return False
        if claim is not None:
            images = request.painting.images
            await results.publish(claim, [images[number] for number in sorted(images)])
        return True

    def _check_waiting(self, request: _Open) -> None:
        """Raise _NotWaiting if this worker stops, or is full.

        In a full worker, the request that paints the images may need this request's place.
        """
        lanes = [other.header.lane for other in self._open.values()]
        if self._context.shutdown.asked.is_set():
            raise _NotWaiting(0.0)
        if lanes.count(request.header.lane) >= self._context.config.generator.max_tasks:
            raise _NotWaiting(FULL_PAUSE_S * (0.5 + random.random()))
        self._check_open(request)

    async def _append_stored(self, request: _Open, urls: list[str]) -> bool:
        """Append stored images. Returns False if one of them is no longer stored."""
        bus = self._context.bus
        files: dict[int, tuple[str, bytes]] = {}
        for number in request.painting.unfinished:
            name = media_store.parse_media_url(urls[number])
            data = name and await media_store.find(bus, name, MAX_MEDIA_BYTES, request.tenant)
            if not name or not data:
                return False
            files[number] = name, data
        for number, (name, data) in files.items():
            # Storing the file again renews its lifetime.
            await media_store.store(bus, name, data, request.tenant)
            await self._append_file(request, number, media_store.media_url(name))
        return True

    async def _paint_all(self, request: _Open) -> bool:
        unfinished = request.painting.unfinished
        texts = await self._encode(request) if unfinished else []
        painted = await _gather([self._paint(request, number, texts) for number in unfinished])
        return all(painted)

    async def _paint(self, request: _Open, number: int, texts: list[Condition]) -> bool:
        """Do the remaining steps of an image, and append it to the log.

        Returns False when this worker stops: another worker then continues after the last stored
        step. Raises RequestEnded.
        """
        steps = request.params.steps
        step, progress = await self._begin(request, number)
        stored, stored_s = step, time.monotonic()
        while step < steps:
            is_stopping = self._context.shutdown.asked.is_set()
            if is_stopping and step > stored:
                await self._note(request, number, step, state=progress)
            if is_stopping:
                return False
            stepped = await self._step(request, number, progress, step, texts)
            step, progress = step + 1, stepped.progress
            checkpoint_s = self._context.config.generator.checkpoint_s
            is_due = step < steps and time.monotonic() - stored_s >= checkpoint_s
            preview = stepped.preview if request.painting.lacks_preview(number, step) else None
            if is_due or preview is not None:
                state = progress if is_due else None
                await self._note(request, number, step, state=state, preview=preview)
            if is_due:
                stored, stored_s = step, time.monotonic()
        file = await self._stored_file(request, number, progress.latents)
        async with request.appending:
            await self._append_file(request, number, file)
        return True

    async def _append_file(self, request: _Open, number: int, file: str) -> None:
        """Append the record of a finished image or video."""
        params, size = request.params, request.size
        if params.frames is None or params.fps is None:
            await request.log.image(number, file, size, request.seed)
        else:
            await request.log.video(file, size, params.frames, params.fps, request.seed)
        request.painting.images[number] = file

    async def _begin(self, request: _Open, number: int) -> tuple[int, Progress]:
        """Return the number of completed steps of an image, and the image after them."""
        model, state = self._image_model, request.painting.state_of(number)
        noise = noise_of(
            request.seed, number, noise_shape_of(model, request.size, request.params.frames)
        )
        initial = model.begin(request.size, noise)
        name = None if state is None else media_store.parse_media_url(state.state)
        if state is not None and name is not None:
            bus, tenant = self._context.bus, request.tenant
            data = await media_store.find(bus, name, MAX_MEDIA_BYTES, tenant)
            progress = None if data is None else decode_state(data, state.step, initial)
            # Latents in another dtype, or that are no longer stored, are computed again.
            if progress is not None:
                return state.step, progress
        return 0, initial

    async def _encode(self, request: _Open) -> list[Condition]:
        """Return the prompt, and with guidance the negative prompt.

        Raises RequestEnded, and _NotWaiting when this worker stops.
        """
        negative = negative_of(self._image_model, request.params)
        texts = [request.prompt] if negative is None else [request.prompt, negative]
        self._check_open(request)
        ticket = request.header.ticket
        assert ticket is not None
        encode = Encode(
            tuple(texts), ticket.cache_scope, request.params.input_images, request.images
        )

        def check() -> None:
            if self._context.shutdown.asked.is_set():
                raise _NotWaiting(0.0)
            self._check_open(request)

        return await self._texts.encode(self._caller(request)._replace(check=check), encode)

    async def _step(
        self, request: _Open, number: int, progress: Progress, step: int, texts: list[Condition]
    ) -> Stepped:
        params = request.params
        self._check_open(request)
        prompt, *negative = texts
        unit = Step(
            progress,
            prompt,
            negative[0] if negative else None,
            params.guidance,
            request.size,
            step,
            params.steps,
        )
        stepped = await self._thread.step(request.header.request_id, number, unit, request.due_s)
        # A request that makes progress did not kill its earlier workers.
        request.job.suspect = False
        return stepped

    def _check_open(self, request: _Open) -> None:
        """Raise RequestEnded if the request has ended, or must have."""
        ticket = request.header.ticket
        assert ticket is not None
        # The notice of an end may be lost. At the deadline, a coordinator ends the request.
        if request.has_ended or self._context.bus.now_ms() >= ticket.deadline_ms:
            raise RequestEnded

    async def _note(
        self,
        request: _Open,
        number: int,
        step: int,
        *,
        state: Progress | None = None,
        preview: TensorData | None = None,
    ) -> None:
        """Store the state after a step, a preview of the image, or both."""
        state_url = preview_url = ""
        if state is not None:
            place = f"{request.header.request_id} {number} {request.painting.next_place(number)}"
            state_url = await media_store.store_url(
                self._context.bus, encode_state(state, step), request.tenant, place
            )
        if preview is not None:
            preview_url = await self._stored_file(request, number, preview)
        steps = request.params.steps
        async with request.appending:
            await request.log.step(number, step, steps, state=state_url, preview=preview_url)
        if state is not None:
            request.painting.count_state(number)

    async def _stored_file(self, request: _Open, number: int, latents: TensorData) -> str:
        fps = request.params.fps
        return await self._files.store(self._caller(request), number, latents, request.size, fps)

    def _caller(self, request: _Open) -> Caller:
        return Caller(
            request.header, request.tenant, request.due_s, lambda: self._check_open(request)
        )

    def _cancel(self, request_id: str) -> None:
        # The step that is being computed is completed, and is the image's last.
        if request_id in self._open:
            self._open[request_id].has_ended = True
        super()._cancel(request_id)


class _NotWaiting(Exception):
    """Raised to requeue a request that waits for the images of another request."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s


async def _gather(coroutines: list[Coroutine[Any, Any, bool]]) -> list[bool]:
    """Run all coroutines. The first error cancels the others, and is raised after their end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
