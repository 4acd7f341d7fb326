"""The jobs that a worker has claimed, and the records of attempts at them."""

import asyncio
import random
from collections.abc import Coroutine, Iterable
from typing import Literal

import structlog
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.heartbeats import DEAD_AFTER_S
from shared.config.schema import DeliveryConfig
from shared.errors import UnsupportedVersion
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.stage import retry
from shared.stage.job import Job

# A worker sends a heartbeat every second: within this time it has just been heard.
ALIVE_S = 1.5
# How long a task of a new round waits while the same worker still has the one before.
AGAIN_PAUSE_S = 0.5
# A job that is left to newer workers goes to any worker of its queue, which may be an older one.
FIRST_NEWER_PAUSE_S = 0.1
MAX_NEWER_PAUSE_S = 2.0

_log = structlog.get_logger()


class ClaimedJobs:
    """The jobs of one worker in one stage, by request id."""

    def __init__(self, bus: Bus, stage: str, worker: str, policy: DeliveryConfig) -> None:
        self._bus = bus
        self._stage = stage
        self._worker = worker
        self._policy = policy
        self._jobs: dict[str, Job] = {}
        self._last_progress_ms = 0.0
        self._background: set[asyncio.Task[None]] = set()

    def add(self, job: Job) -> None:
        assert job.request_id is not None
        self._jobs[job.request_id] = job

    def release(self, job: Job) -> None:
        """Forget a job; does nothing when another job has its place."""
        if job.request_id is not None and self._jobs.get(job.request_id) is job:
            del self._jobs[job.request_id]

    def note_ended(self, subject: str) -> None:
        """Mark a claimed job whose request has ended, as the subject of the notice says."""
        if (job := self._jobs.get(subjects.last_token(subject))) is not None:
            job.ended = True

    def receive(self, job: Job) -> Job | None:
        """Return a new job, or None when this worker has claimed a job of the same request.

        The new delivery then takes the place of the old one: the broker has restarted, or progress
        was reported too late. A job that hangs reports no progress for this delivery either, so
        another worker gets it in the end. Another message about the request, such as the task of a
        new round, is put off until the claimed job is over.
        """
        claimed = self._jobs.get(job.request_id or "")
        if claimed is None:
            return job
        if job.delivery.sequence != claimed.delivery.sequence:
            self._start(job.delivery.retry(AGAIN_PAUSE_S))
            return None
        claimed.delivery.abandon()
        claimed.delivery = job.delivery
        return None

    def progressed(self, jobs: Iterable[Job]) -> None:
        """Report to the broker, a few times within the ack wait, that these jobs are advancing."""
        now_ms = self._bus.now_ms()
        if now_ms - self._last_progress_ms > 1000 * self._policy.ack_wait_s / 4:
            self._last_progress_ms = now_ms
            for job in jobs:
                self._start(job.delivery.progress())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.waiting]

    async def load_history(
        self, job: Job, log_len: int, policy: DeliveryConfig | None = None
    ) -> bool:
        """Read how earlier attempts ended. Raises when `policy`, by default the policy of all
        stages, allows no other attempt.

        False while it is unknown whether a worker that had the job is dead.
        """
        assert job.request_id is not None
        stored = await self._bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(job.request_id))
        records = (decode_attempt(message.data) for message in stored)
        job.attempts = [record for record in records if record is not None]
        workers = {a.worker for a in job.attempts if a.stage == self._stage and a.outcome == "open"}
        others = sorted(workers - {self._worker})
        silences = await asyncio.gather(
            *(self._bus.heartbeats.lag_s(w, self._worker) for w in others)
        )
        if any(ALIVE_S < silence_s <= DEAD_AFTER_S for silence_s in silences):
            return False
        dead = {w for w, silence_s in zip(others, silences, strict=True) if silence_s > ALIVE_S}
        job.history = retry.recount(job.attempts, self._stage, log_len, dead)
        if (error := retry.verdict(job.history, policy or self._policy)) is not None:
            raise error
        return True

    def may_begin(self, job: Job) -> bool:
        """Whether the job may run now: a worker runs one suspect at a time.

        If the worker dies too, it is known of which request.
        """
        if job.history.suspect:
            job.suspect = not any(
                other.suspect for other in self._jobs.values() if other is not job
            )
            return job.suspect
        return True

    async def record_attempt(self, job: Job, log_len: int) -> None:
        number, now_ms = job.delivery.attempt, self._bus.now_ms()
        model = subjects.model_of_stage(job.delivery.subject)
        attempt = AttemptRecord(self._stage, self._worker, number, now_ms, log_len, model=model)
        job.attempts.append(attempt)
        await self._publish(job, attempt)

    async def record_outcome(self, job: Job, outcome: Literal["requeued", "failed"]) -> None:
        """Record how this worker's attempt has ended, unless it ended well."""
        ours = [a for a in job.attempts if a.worker == self._worker and a.outcome == "open"]
        if ours:
            await self._publish(job, replace(ours[-1], outcome=outcome))

    async def leave(self, job: Job, error: UnsupportedVersion) -> None:
        """Return a job to its queue that a newer worker can read; this is no attempt at it."""
        attempt = job.delivery.attempt
        try:
            await self.record_outcome(job, "requeued")
            # Deliveries 1, 2, 4, 8 … are enough to know of, and leave room for other records.
            if job.request_id is not None and attempt & (attempt - 1) == 0:
                _log.warning("left_to_newer_worker", request_id=job.request_id, why=error.message)
                now_ms, model = self._bus.now_ms(), subjects.model_of_stage(job.delivery.subject)
                left = AttemptRecord(self._stage, self._worker, attempt, now_ms, 0, "requeued")
                await self._publish(job, replace(left, model=model, unread=error.message))
        finally:
            self.release(job)
            pause_s = min(FIRST_NEWER_PAUSE_S * 2 ** min(attempt - 1, 10), MAX_NEWER_PAUSE_S)
            await job.delivery.retry(pause_s * (1 - random.random() / 2))

    async def _publish(self, job: Job, attempt: AttemptRecord) -> None:
        assert job.request_id is not None
        await self._bus.publish_without_id(subjects.attempts(job.request_id), to_json(attempt))
