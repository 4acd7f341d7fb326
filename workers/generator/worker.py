"""Generator: makes sound of the codec frames that another stage writes, chunk by chunk.

A request's state is in two logs. The frames are in the log of the stage before, which is followed
while it grows, and what was made of them is in this stage's own. So any generator can go on with a
request, at the next chunk.
"""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from shared.codec.envelope import TensorData
from shared.errors import ConfigError
from shared.heap import keep_freed_memory
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.pipeline import AUDIO, CODES
from shared.protocol.records import OutputSummary
from shared.protocol.task_messages import FollowBody, Task
from shared.stage.inputs import RequestEnded, follow_codes
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.stage import SUSPECT_PAUSE_S
from shared.stage.worker_loop import Done, Ended, Outcome, Requeue, WorkerLoop
from shared.state.token_log import is_final, last_record
from shared.task_set import TaskSet
from workers.generator.core.speech import Playback, Speech
from workers.generator.core.vocoder import Vocoder
from workers.generator.loader import load_vocoder
from workers.generator.vocoder_thread import VocoderThread

WATCH_S = 0.5
# A worker runs one suspect at a time. One whose frames are not there is to make room for others.
SUSPECT_WAIT_S = 2.0
BATCH_LAG_S = 5.0
"""The head start of the interactive lane: a batch request is as urgent as one that runs dry so much
later."""


async def main(context: Context) -> None:
    config, name = context.config, context.model
    if name is None:
        raise ConfigError("a generator serves one model: name it with --model", field="model")
    stage = context.pipelines[name].stage(context.stage.name)
    key = f"models.{name}.stages.{context.stage.name}"
    if stage is None or stage.chunks is None or stage.output is None or stage.output.kind != AUDIO:
        message = f"a generator follows an input {CODES!r}, and writes an output of kind {AUDIO!r}"
        raise ConfigError(f"{key}: {message}", field=key)
    # Chunks are computed in arrays of the same sizes.
    keep_freed_memory()
    context.step("loading the vocoder")
    folder = Path(stage.path or config.models[name].path)
    vocoder = await asyncio.to_thread(load_vocoder, folder, stage.chunks, key)
    thread = VocoderThread(vocoder, config.generator.max_batch)
    await GeneratorWorker(context, name, stage.chunks, vocoder, thread).serve()


@dataclass(slots=True, eq=False)
class _Open:
    """A request that this worker has in flight."""

    job: Job
    speech: Speech
    playback: Playback
    lag_s: float
    patience: asyncio.Timeout
    """For how long a suspect waits for its first chunk's frames."""


@dataclass(slots=True, eq=False)
class GeneratorWorker:
    _context: Context
    _model: str
    _chunks: ChunkSpec
    _vocoder: Vocoder
    _thread: VocoderThread
    _in_flight: dict[str, Job] = field(default_factory=dict)
    _background: TaskSet = field(default_factory=TaskSet)
    _num_samples: int = 0

    async def serve(self) -> None:
        context = self._context
        loop = WorkerLoop(context)
        self._register_metrics()
        await context.bus.watch_subjects(subjects.ENDED_FILTER, self._on_ended)
        await loop.add_stage(
            [self._model], context.config.generator.max_tasks, FollowBody, self._handle
        )
        context.ready([self._model], lambda: self._load(loop))
        self._background.start(self._thread.work())
        self._background.start(self._watch())
        try:
            await loop.run()
        finally:
            for task in self._background:
                task.cancel()
            self._thread.close()

    def _register_metrics(self) -> None:
        metrics, thread = self._context.metrics.of(self._model), self._thread
        thread.on_batch = metrics.histogram("generator_batch_chunks").observe
        metrics.set_function("generator_waiting_chunks", lambda: thread.num_waiting)
        metrics.set_function(
            "audio_seconds_total", lambda: self._num_samples / self._vocoder.sample_rate
        )

    def _load(self, loop: WorkerLoop) -> dict[str, float]:
        return {"held": loop.num_claimed, "waiting": self._thread.num_waiting}

    async def _watch(self) -> None:
        """Report progress, and end the process when a batch does not end.

        A request that waits for frames waits for another stage, and a deadline ends it.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            self._context.stage.claims.progressed(self._in_flight.values())
            if self._thread.batch_s > self._context.config.generator.step_timeout_s:
                self._context.log.error("batch_hangs")
                # Nothing stops a thread. The claimed tasks come to another generator.
                os._exit(1)

    async def _handle(self, task: Task[FollowBody], _: list[TensorData], job: Job) -> Outcome:
        assert job.log is not None
        header = task.header
        speech = Speech(self._chunks, self._vocoder, job.log.records)
        lag_s = 0.0 if header.lane == subjects.LANES[0] else BATCH_LAG_S
        patience = asyncio.timeout(SUSPECT_WAIT_S if job.suspect else None)
        request = _Open(job, speech, Playback(time.monotonic()), lag_s, patience)
        self._in_flight[header.request_id] = job
        try:
            async with patience:
                has_all = await self._follow(request, task)
        except RequestEnded:
            return Ended()
        except TimeoutError:
            if not patience.expired():
                raise
            return Requeue(SUSPECT_PAUSE_S)
        finally:
            del self._in_flight[header.request_id]
        if not has_all:
            return Requeue()
        self._log_finished(request)
        return Done(OutputSummary(units={"samples": speech.num_samples}))

    async def _follow(self, request: _Open, task: Task[FollowBody]) -> bool:
        """Make chunks of the frames as they come. False when another worker is to go on.

        Raises RequestEnded.
        """
        records = follow_codes(self._context.bus, task.header, task.body.inputs[CODES])
        async with contextlib.aclosing(records):
            async for record in records:
                request.speech.add(record)
                if not await self._make_chunks(request):
                    return False
        request.speech.is_complete = True
        return await self._make_chunks(request)

    async def _make_chunks(self, request: _Open) -> bool:
        """Make the chunks whose frames are there, and append each to the log.

        False when this worker stops, or a suspect has waited for too long: the next one goes on
        behind what is in the log.
        """
        job, speech = request.job, request.speech
        assert job.log is not None
        assert job.request_id is not None
        while (window := speech.next_window()) is not None:
            # `wait_for` of Python 3.11 may swallow the cancellation of a timeout.
            if self._context.shutdown.asked.is_set() or request.patience.expired():
                return False
            request.patience.reschedule(None)
            dry_at_s = request.playback.dry_at_s + request.lag_s
            samples = await self._thread.speak(job.request_id, speech.codes, window, dry_at_s)
            pcm = samples.astype("<i2").tobytes()
            await job.log.audio(speech.num_samples, pcm, self._vocoder.sample_rate)
            # This request did not kill the workers that had it before.
            job.suspect = False
            self._on_made(request, len(samples))
        return True

    def _on_made(self, request: _Open, num_samples: int) -> None:
        metrics, speech = self._context.metrics.of(self._model), request.speech
        ticket = request.job.ticket
        if speech.num_samples == 0 and ticket is not None:
            waited_s = max(0.0, self._context.bus.now_ms() - ticket.accepted_ms) / 1000
            metrics.histogram("time_to_first_audio_seconds").observe(waited_s)
        gap_s = request.playback.add(num_samples / self._vocoder.sample_rate, time.monotonic())
        metrics.counter("audio_gap_seconds_total").add(gap_s)
        speech.num_samples += num_samples
        self._num_samples += num_samples

    def _log_finished(self, request: _Open) -> None:
        job, speech = request.job, request.speech
        self._context.log.info(
            "spoken",
            request_id=job.request_id,
            attempt=job.delivery.attempt,
            frames=len(speech.codes),
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )

    def _on_ended(self, subject: str) -> None:
        request_id = subjects.last_token(subject)
        if request_id in self._in_flight:
            self._background.start(self._cancel_if_ended(request_id))

    async def _cancel_if_ended(self, request_id: str) -> None:
        """Let go of a chunk whose request's log confirms the notice that it has ended."""
        if is_final(await last_record(self._context.bus, request_id)):
            self._thread.cancel(request_id)
