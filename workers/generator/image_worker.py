"""The generator of images, which it paints of a text, denoising step by step.

The log of the images has all that another generator needs to go on: the finished images, and of the
others the latents after a step, which are stored like files. Without them an image begins anew from
its noise, which is a function of the seed, and has the same pixels.
"""

import asyncio
import io
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from shared.client import MAX_MEDIA_BYTES
from shared.codec.envelope import TensorData
from shared.protocol import subjects
from shared.protocol.images import PaintParams, parse_size
from shared.protocol.records import OutputSummary
from shared.protocol.sampling import seed_of
from shared.protocol.task_messages import PaintBody, Task, TaskHeader
from shared.stage.inputs import RequestEnded
from shared.stage.job import Job
from shared.stage.stage import SUSPECT_PAUSE_S
from shared.stage.worker_loop import Done, Ended, Outcome, Requeue
from shared.state import media_store
from shared.state.token_log import LogWriter
from workers.generator.core.denoising import (
    ImageModel,
    Latents,
    Pixels,
    Step,
    Stepped,
    noise_of,
    time_of,
)
from workers.generator.core.painting import Painting
from workers.generator.image_results import ImageClaim, ImageResults, key_of
from workers.generator.image_thread import ImageThread
from workers.generator.worker import GeneratorWorker

MAX_ITEMSIZE = 8
"""Bytes of a value of the widest dtype that latents may have."""
FULL_PAUSE_S = 1.0
"""Average pause of a request that waits for another while its worker has no place left."""
BATCH_LAG_S = 1e9
"""The head start of the interactive lane: its steps go before all of the batch lane."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request that this worker has in flight."""

    header: TaskHeader
    job: Job
    log: LogWriter
    params: PaintParams
    painting: Painting
    tokens: tuple[int, ...]
    negative: tuple[int, ...]
    seed: int
    due_s: float
    appending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A log has one append at a time, and the images of a request share it."""
    has_ended: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return parse_size(self.params.size)

    @property
    def tenant(self) -> str:
        return "" if self.header.ticket is None else self.header.ticket.tenant


@dataclass(slots=True, eq=False)
class ImageWorker(GeneratorWorker):
    """Paints images. Each is a task of the event loop, whose steps the thread computes."""

    _thread: ImageThread
    _model_of_images: ImageModel
    _weights: str = ""
    """What the pixels depend on beside the request: weights, stage and dtype."""
    _results: ImageResults | None = None
    """Without it, nothing is cached."""
    body = PaintBody
    _open: dict[str, _Open] = field(default_factory=dict, init=False)

    def _register_metrics(self) -> None:
        metrics = self._context.metrics.of(self._model)
        metrics.set_function("image_steps_total", lambda: self._thread.num_steps)

    async def _handle(self, task: Task[PaintBody], _: list[TensorData], job: Job) -> Outcome:
        request = await self._opened(task, job)
        request_id, params = task.header.request_id, request.params
        self._in_flight[request_id], self._open[request_id] = job, request
        try:
            is_painted = await self._paint_once(request)
        except RequestEnded:
            return Ended()
        except _NotWaiting as stopped:
            return Requeue(stopped.after_s)
        finally:
            del self._in_flight[request_id], self._open[request_id]
        if not is_painted:
            return Requeue()
        self._context.log.info(
            "painted",
            request_id=request_id,
            attempt=job.delivery.attempt,
            images=params.n,
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )
        units: dict[str, float] = {
            "images": params.n,
            "steps": params.n * params.steps,
            "prompt_tokens": len(request.tokens),
        }
        return Done(OutputSummary(units=units))

    async def _opened(self, task: Task[PaintBody], job: Job) -> _Open:
        """Open a request. Raises ContextTooLong for a text that the model does not read whole."""
        header, model = task.header, self._model_of_images
        assert job.log is not None
        assert header.image is not None
        assert header.ticket is not None
        lag_s = 0.0 if header.lane == subjects.LANES[0] else BATCH_LAG_S
        params = header.image
        # A text may be as long as a message. Meanwhile, this loop works for other requests.
        tokens = await asyncio.to_thread(model.encode, task.body.text, "prompt")
        negative = await asyncio.to_thread(
            model.encode, params.negative_prompt, "image.negative_prompt"
        )
        return _Open(
            header,
            job,
            job.log,
            params,
            Painting(params, job.log.records),
            tokens,
            negative,
            seed_of(params.seed, header.request_id),
            header.ticket.accepted_ms / 1000 + lag_s,
        )

    async def _paint_once(self, request: _Open) -> bool:
        """Append all images, which an equal request may have painted. False as for `_paint`.

        Raises RequestEnded and _NotWaiting.
        """
        header, tokens, results = request.header, request.tokens, self._results
        key = None if results is None else key_of(self._weights, header, tokens)
        if results is None or key is None:
            return await self._paint_all(request)
        # A request that waits kills no worker, so it must not keep other suspects from their turn.
        request.job.suspect = False
        found = await results.find_or_claim(
            key, header.request_id, lambda: self._check_waiting(request)
        )
        claim: ImageClaim | None
        if not isinstance(found, list):
            claim = found
        elif await self._append_found(request, found):
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
        """Raise _NotWaiting if this worker stops, or has no place left: the request that is waited
        for may need it."""
        lanes = [other.header.lane for other in self._open.values()]
        if self._context.shutdown.asked.is_set():
            raise _NotWaiting(0.0)
        if lanes.count(request.header.lane) >= self._context.config.generator.max_tasks:
            raise _NotWaiting(FULL_PAUSE_S * (0.5 + random.random()))
        self._check_open(request)

    async def _append_found(self, request: _Open, found: list[str]) -> bool:
        """Append images that are stored. False if one of them is not stored any more."""
        bus, params = self._context.bus, request.params
        files: dict[int, tuple[str, bytes]] = {}
        for number in request.painting.unfinished:
            name = media_store.parse_media_url(found[number])
            data = name and await media_store.find(bus, name, MAX_MEDIA_BYTES, request.tenant)
            if not name or not data:
                return False
            files[number] = name, data
        for number, (name, data) in files.items():
            # So that the file stays as long as one that is painted now.
            await media_store.store(bus, name, data, request.tenant)
            url, size = media_store.media_url(name), parse_size(params.size)
            await request.log.image(number, url, size, request.seed)
            request.painting.images[number] = url
        return True

    async def _paint_all(self, request: _Open) -> bool:
        painted = await _gather(
            [self._paint(request, number) for number in request.painting.unfinished]
        )
        return all(painted)

    async def _paint(self, request: _Open, number: int) -> bool:
        """Do the steps of an image that are left, and append it to the log.

        False when this worker stops: the next one goes on behind the steps that are done. Raises
        RequestEnded.
        """
        steps, params = request.params.steps, request.params
        step, latents = await self._begin(request, number)
        stored, stored_s = step, time.monotonic()
        while step < steps:
            is_stopping = self._context.shutdown.asked.is_set()
            if is_stopping and step > stored:
                await self._note(request, number, step, state=latents)
            if is_stopping:
                return False
            stepped = await self._step(request, number, latents, step)
            step, latents = step + 1, stepped.latents
            checkpoint_s = self._context.config.generator.checkpoint_s
            is_due = step < steps and time.monotonic() - stored_s >= checkpoint_s
            preview = stepped.finished if request.painting.lacks_preview(number, step) else None
            if is_due or preview is not None:
                state = latents if is_due else None
                await self._note(request, number, step, state=state, preview=preview)
            if is_due:
                stored, stored_s = step, time.monotonic()
        png = await self._stored_png(request, latents)
        async with request.appending:
            await request.log.image(number, png, parse_size(params.size), request.seed)
        request.painting.images[number] = png
        return True

    async def _begin(self, request: _Open, number: int) -> tuple[int, Latents]:
        """Return the number of steps of an image that are done, and its latents after them."""
        model, state = self._model_of_images, request.painting.state_of(number)
        shape = model.latents_shape(*request.size)
        name = None if state is None else media_store.parse_media_url(state.state)
        if state is not None and name is not None:
            num_values = int(np.prod(shape))
            num_bytes, max_bytes = num_values * model.dtype.itemsize, num_values * MAX_ITEMSIZE
            data = await media_store.find(self._context.bus, name, max_bytes, request.tenant)
            # Latents of another worker's dtype, or that are gone, are made again.
            if data is not None and len(data) == num_bytes:
                return state.step, np.frombuffer(data, model.dtype).reshape(shape).copy()
        return 0, noise_of(request.seed, number, shape, model.dtype)

    async def _step(self, request: _Open, number: int, latents: Latents, step: int) -> Stepped:
        header, steps = request.header, request.params.steps
        self._check_open(request)
        unit = Step(
            latents,
            request.tokens,
            request.negative,
            request.params.guidance,
            time_of(step, steps),
            time_of(step + 1, steps),
        )
        stepped = await self._thread.step(header.request_id, number, unit, request.due_s)
        # This request did not kill the workers that had it before.
        request.job.suspect = False
        return stepped

    def _check_open(self, request: _Open) -> None:
        """Raise RequestEnded if the request has ended, or must have."""
        ticket = request.header.ticket
        assert ticket is not None
        # The notice of an end may be lost, and at the deadline somebody else ends the request.
        if request.has_ended or self._context.bus.now_ms() >= ticket.deadline_ms:
            raise RequestEnded

    async def _note(
        self,
        request: _Open,
        number: int,
        step: int,
        *,
        state: Latents | None = None,
        preview: Latents | None = None,
    ) -> None:
        """Store the latents after a step, a preview of the image, or both."""
        state_url = "" if state is None else await self._stored(request, state.tobytes())
        preview_url = "" if preview is None else await self._stored_png(request, preview)
        steps = request.params.steps
        async with request.appending:
            await request.log.step(number, step, steps, state=state_url, preview=preview_url)

    async def _stored_png(self, request: _Open, latents: Latents) -> str:
        png = await asyncio.to_thread(lambda: to_png(self._model_of_images.pixels(latents)))
        return await self._stored(request, png)

    async def _stored(self, request: _Open, data: bytes) -> str:
        name = await media_store.hash_media(data)
        await media_store.store(self._context.bus, name, data, request.tenant)
        return media_store.media_url(name)

    def _cancel(self, request_id: str) -> None:
        # The step that is being computed goes on, and is the image's last.
        if request_id in self._open:
            self._open[request_id].has_ended = True
        GeneratorWorker._cancel(self, request_id)


class _NotWaiting(Exception):
    """A request that waits for the images of another goes back to its queue."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s


def to_png(pixels: Pixels) -> bytes:
    """The PNG file of an image: the same bytes for the same pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


async def _gather(coroutines: list[Coroutine[Any, Any, bool]]) -> list[bool]:
    """Run all; the first error cancels the others, and is raised when they have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
