"""Sound generator: converts another stage's codec frames to sound, chunk by chunk.

A request's state is in two logs. The frames are in the log of the previous stage, which is read
while it grows, and the sound is in the log of this stage. Any generator can therefore continue a
request at the next chunk.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

from shared.codec.envelope import TensorData
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.pipeline import CODES
from shared.protocol.records import OutputSummary
from shared.protocol.sampling import seed_of
from shared.protocol.task_messages import FollowBody, Task
from shared.stage.inputs import RequestEnded, follow_codes
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.stage import SUSPECT_PAUSE_S
from shared.stage.worker_loop import Done, Ended, Outcome, Requeue
from workers.generator.core.speech import Playback, Speech
from workers.generator.core.vocoder import Speaker, Vocoder
from workers.generator.vocoder_thread import VocoderThread
from workers.generator.worker import GeneratorWorker

# A worker runs one suspect at a time. A suspect without frames must make room for other suspects.
SUSPECT_WAIT_S = 2.0
BATCH_LAG_S = 5.0
"""Lag of the batch lane: a batch request is as urgent as an interactive request that runs out of
sound this much later."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request in flight in this worker."""

    job: Job
    speech: Speech
    speaker: Speaker
    playback: Playback
    lag_s: float
    patience: asyncio.Timeout
    """Limit on the wait of a suspect for the frames of its first chunk."""
    is_whole: bool
    """Whether this attempt began at the start of the speech."""


class SpeechWorker(GeneratorWorker):
    """Converts frames to sound, chunk by chunk."""

    body = FollowBody

    def __init__(
        self,
        context: Context,
        model: str,
        thread: VocoderThread,
        chunks: ChunkSpec,
        vocoder: Vocoder,
    ) -> None:
        super().__init__(context, model, thread)
        self._thread = thread
        self._chunks = chunks
        self._vocoder = vocoder
        self._num_samples = 0

    def _register_metrics(self) -> None:
        metrics = self._context.metrics.of(self._model)
        metrics.set_function(
            "audio_seconds_total", lambda: self._num_samples / self._vocoder.sample_rate
        )

    async def _handle(self, task: Task[FollowBody], _: list[TensorData], job: Job) -> Outcome:
        assert job.log is not None
        header = task.header
        speech = Speech(self._chunks, self._vocoder, job.log.records)
        lag_s = 0.0 if header.lane == subjects.LANES[0] else BATCH_LAG_S
        patience = asyncio.timeout(SUSPECT_WAIT_S if job.suspect else None)
        speaker = Speaker(header.voice, seed_of(header.sampling.seed, header.request_id))
        playback, is_whole = Playback(time.monotonic()), speech.num_samples == 0
        request = _Open(job, speech, speaker, playback, lag_s, patience, is_whole)
        try:
            async with patience:
                has_all = await self._follow(request, task)
        except RequestEnded:
            return Ended()
        except TimeoutError:
            if not patience.expired():
                raise
            return Requeue(SUSPECT_PAUSE_S)
        if not has_all:
            return Requeue()
        self._on_finished(request)
        return Done(OutputSummary(units={"samples": speech.num_samples}))

    async def _follow(self, request: _Open, task: Task[FollowBody]) -> bool:
        """Make chunks from frames as they arrive. Returns False if another worker must continue.

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
        """Make all chunks that have their frames, and append each to the log.

        Returns False when this worker stops, or a suspect has waited too long: another worker then
        continues after the last chunk in the log.
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
            samples = await self._thread.speak(
                job.request_id, speech.codes, window, dry_at_s, request.speaker
            )
            pcm = samples.astype("<i2").tobytes()
            end_token = speech.end_token_at(window.end)
            await job.log.audio(speech.num_samples, pcm, self._vocoder.sample_rate, end_token)
            # A request that makes progress did not kill its earlier workers.
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

    def _on_finished(self, request: _Open) -> None:
        job, speech = request.job, request.speech
        if request.is_whole and speech.num_samples:
            took_s = (self._context.bus.now_ms() - job.received_ms) / 1000
            length_s = speech.num_samples / self._vocoder.sample_rate
            metrics = self._context.metrics.of(self._model)
            metrics.histogram("audio_realtime_factor").observe(took_s / length_s)
        self._context.log.info(
            "spoken",
            request_id=job.request_id,
            attempt=job.delivery.attempt,
            frames=len(speech.codes),
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )
