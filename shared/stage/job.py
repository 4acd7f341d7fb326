"""Jobs: deliveries that a worker has claimed, with records of attempts, and counters."""

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Literal

import structlog
from msgspec.structs import replace

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.bus.heartbeats import DEAD_AFTER_S
from shared.codec.envelope import TensorData
from shared.config.schema import DeliveryConfig
from shared.errors import DeadlineExceeded, PagemillError, Unavailable, UnsupportedVersion
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import TASKS, TASKS_S, AttemptRecord, decode_attempt
from shared.protocol.multimodal import BlobRef
from shared.protocol.records import StageSpan
from shared.protocol.subjects import RequestPlace
from shared.protocol.task_messages import RequestTicket, TaskBody, TaskHeader
from shared.stage import retry, tasks
from shared.stage.retry import NO_HISTORY, History
from shared.state.token_log import LogWriter
from shared.telemetry import logs
from shared.telemetry.metrics import Metrics

# A worker sends a heartbeat every second. One with a heartbeat in this time is alive.
ALIVE_S = 1.5
# Pause of a task of a new round while the worker still has the task of the round before.
AGAIN_PAUSE_S = 0.5
# Pauses of a job that needs a newer worker. Its queue may deliver it to an older one again.
FIRST_NEWER_PAUSE_S = 0.1
MAX_NEWER_PAUSE_S = 2.0

_log = structlog.get_logger()


EndJob = Callable[["Job", PagemillError], Awaitable[None]]


class Job:
    """A delivery in a worker, from its arrival to its settlement.

    `request_id` is an id of `names.job_id` for a batch or a response. It is None for a message
    without a usable id, which can only become a dead letter.
    `end` ends the subject of the job with an error, if it is not a request with a token log.
    """

    def __init__(
        self,
        delivery: Delivery,
        received_ms: float,
        request_id: str | None,
        header: TaskHeader | None = None,
        *,
        history: History = NO_HISTORY,
        end: EndJob | None = None,
    ) -> None:
        self.delivery = delivery
        self.received_ms = received_ms
        self.request_id = request_id
        self.header = header
        """None until the message has been decoded."""
        self.body: TaskBody | None = None
        """None until the message has been decoded."""
        self.tensors: Sequence[TensorData] = ()
        """Tensors of the message."""
        self.path: list[StageSpan] = []
        """The stages that the request has passed."""
        self.log: LogWriter | None = None
        """Log of this stage's output, or the request's own log for a stage without an output."""
        self.attempts: list[AttemptRecord] = []
        """Records of earlier attempts, and of this one."""
        self.history = history
        self.suspect = False
        """A worker died while it ran this job, which may be the cause. The job has begun again, and
        has had no progress since."""
        self.waiting = False
        """The job waits for its work to begin, or for a turn. Progress of other jobs counts as
        progress of this one."""
        self.ended = False
        """A notice said that the request has ended elsewhere."""
        self.running = False
        """The work runs in a place where it could end the process."""
        self.inputs: list[BlobRef] = []
        """Payloads that came with the task. They are released when it is acknowledged."""
        self.outputs: list[BlobRef] = []
        """Payloads made for the next stage. They belong to this job until that task is stored."""
        self.end = end

    @property
    def ticket(self) -> RequestTicket | None:
        return None if self.header is None else self.header.ticket

    @property
    def tenant(self) -> str:
        """Tenant of the job; "" if it has no valid tenant."""
        if self.ticket is not None:
            return self.ticket.tenant
        tenant = self.delivery.tenant or names.split_id(self.request_id or "")[1]
        return tenant if names.is_name(tenant) else ""

    @property
    def request_place(self) -> RequestPlace | None:
        """Place of the request in its queue, also for a task that cannot be decoded."""
        if self.ticket is not None:
            return self.ticket.place
        if self.request_id is None or not subjects.is_stage(self.delivery.subject):
            return None
        return subjects.place_of(self.delivery.msg_id or "", self.request_id)

    def identify(
        self,
        header: TaskHeader,
        body: TaskBody | None = None,
        tensors: Sequence[TensorData] = (),
    ) -> None:
        """Set the header, the body and the tensors of the decoded message."""
        self.header, self.body, self.tensors = header, body, tensors
        self.path = header.path
        if header.ticket is not None and header.ticket.traceparent:
            # A version of two digits, and a trace id of 32. A worker may have sent anything else.
            logs.bind_trace(header.ticket.traceparent[3:35])

    def replace_ticket(self, data: bytes) -> None:
        """Take the ticket and the payloads of `data`, the same task, published again after a loss.

        The owners of the earlier payloads have released them.
        """
        if self.header is not None and self.body is not None:
            task, self.tensors = tasks.decode(data, type(self.body))
            self.header = replace(self.header, ticket=task.header.ticket)
            self.body, self.inputs = task.body, task.body.blobs()


class StageCounters:
    """Counts the arrivals, retries and ends of one worker's jobs."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        # Alerts need the rates of these, which a series that begins with its first count lacks.
        metrics.counter("request_errors_total", code=DeadlineExceeded.code)
        self._num_tasks = 0
        self._tasks_s = 0.0

    def load(self) -> dict[str, float]:
        """Return the number of handled tasks and the sum of their times, for heartbeats."""
        return {TASKS: self._num_tasks, TASKS_S: self._tasks_s} if self._num_tasks else {}

    def arrived(self, job: Job) -> None:
        metrics = self._metrics_of(job)
        redeliveries = metrics.counter("stage_redeliveries_total")
        if job.delivery.attempt > 1:
            redeliveries.add()
        else:
            waited_s = max(0.0, job.received_ms - job.delivery.stored_ms) / 1000
            metrics.histogram("stage_queue_seconds").observe(waited_s)

    def handled(self, job: Job) -> None:
        took_s = (self._bus.now_ms() - job.received_ms) / 1000
        self._num_tasks += 1
        self._tasks_s += took_s
        self._metrics_of(job).histogram("stage_handling_seconds").observe(took_s)

    def retried(self, job: Job, cause: PagemillError) -> None:
        self._metrics_of(job).counter("stage_retries_total", code=cause.code).add()

    def given_up(self, job: Job, cause: PagemillError) -> None:
        self._metrics_of(job).counter("stage_dead_letters_total", code=cause.code).add()

    def ended_with(self, cause: PagemillError) -> None:
        """Count a request that this worker has ended with an error."""
        self._metrics.counter("request_errors_total", code=cause.code).add()

    def _metrics_of(self, job: Job) -> Metrics:
        return self._metrics.of(subjects.model_of_stage(job.delivery.subject))


async def request_is_settled(bus: Bus, job: Job) -> bool:
    """Acknowledge a job's request by its receipt. Return whether it has left its queue."""
    ticket = job.ticket
    if ticket is None:
        # Without a receipt, the request can only be deleted.
        if job.request_place is not None:
            await bus.delete(*job.request_place)
        return True
    if ticket.receipt == job.delivery.receipt:
        return True
    if await bus.acknowledge(ticket.receipt):
        return True
    # A server that was cut off may have issued a receipt that its successor does not know. If the
    # request is still in the queue, it is delivered to a coordinator again, which settles it.
    try:
        return await request_queue.queued_request(bus, ticket.place) is None
    except Unavailable:
        return False


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
        """Remove a job. Does nothing if another job has taken its place."""
        if job.request_id is not None and self._jobs.get(job.request_id) is job:
            del self._jobs[job.request_id]

    def note_ended(self, subject: str) -> None:
        """Mark the claimed job of an ended request; `subject` is the subject of the notice."""
        if (job := self._jobs.get(subjects.last_token(subject))) is not None:
            job.ended = True

    def receive(self, job: Job) -> Job | None:
        """Return a new job, or None when this worker has claimed a job of the same request.

        The new delivery then takes the place of the old one: the broker has restarted, progress was
        reported too late, or a lost task was published again. A job that hangs reports no progress
        for this delivery either, so another worker gets it in the end. Another message about the
        request, such as the task of a new round, is put off until the claimed job is over.
        """
        claimed = self._jobs.get(job.request_id or "")
        if claimed is None:
            return job
        new, old = job.delivery, claimed.delivery
        is_republished = old.is_lost and new.msg_id == old.msg_id
        if new.sequence != old.sequence and not is_republished:
            self._start(new.retry(AGAIN_PAUSE_S))
            return None
        if is_republished:
            claimed.replace_ticket(new.data)
        old.abandon()
        claimed.delivery = new
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

    @property
    def running(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.running]

    def may_be_held(self, job: Job) -> bool:
        """Return whether a worker may have the request although its task is new.

        A broker that runs alone loses the tasks, and its coordinators publish them again.
        """
        accepted_ms = math.inf if job.ticket is None else job.ticket.accepted_ms
        return accepted_ms < self._bus.streams.tasks.since_ms

    async def load_history(
        self,
        job: Job,
        log_len: int,
        policy: DeliveryConfig | None = None,
        written_ms: float = 0.0,
    ) -> bool:
        """Read the records of earlier attempts, and set the history of the job.

        `written_ms` is the time of the last record in the log. Return False while another worker
        has the request, or it is unknown whether an earlier worker is dead. Raises the error of
        `retry.verdict` if `policy`, by default the policy of all stages, allows no other attempt.
        """
        assert job.request_id is not None
        stored = await self._bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(job.request_id))
        records = (decode_attempt(message.data) for message in stored)
        job.attempts = [record for record in records if record is not None]
        latest = retry.latest_records(job.attempts, self._stage)
        others = sorted({a.worker for a in latest if a.outcome == "open"} - {self._worker})
        silences = await asyncio.gather(
            *(self._bus.heartbeats.lag_s(w, self._worker) for w in others)
        )
        if any(ALIVE_S < silence_s <= DEAD_AFTER_S for silence_s in silences):
            return False
        if others and self._is_held(job, min(silences) <= ALIVE_S, written_ms):
            return False
        dead = {w for w, silence_s in zip(others, silences, strict=True) if silence_s > ALIVE_S}
        job.history = retry.recount(job.attempts, self._stage, log_len, dead)
        if (error := retry.verdict(job.history, policy or self._policy)) is not None:
            raise error
        return True

    def _is_held(self, job: Job, is_alive: bool, written_ms: float) -> bool:
        """Return whether another worker still has the request of a task that was lost.

        Its worker cannot report progress of the lost task, so the records in its log count.
        """
        if not self.may_be_held(job):
            return False
        now_ms, lost_ms = self._bus.now_ms(), self._bus.streams.tasks.since_ms
        if now_ms < lost_ms + 1000 * DEAD_AFTER_S:
            # The heartbeats were lost as well.
            return True
        return is_alive and now_ms < max(lost_ms, written_ms) + 1000 * self._policy.ack_wait_s

    def may_begin(self, job: Job) -> bool:
        """Return whether the job may run now.

        A worker runs one job at a time that workers died with before it had any progress. If it
        dies, this job is known to be the cause. A job that had progress may be the cause too, so
        such jobs run together, but not at the same time as the others.
        """
        suspects = [other for other in self._jobs.values() if other.suspect and other is not job]
        if job.history.deaths:
            job.suspect = not suspects
        elif job.history.is_resumed:
            job.suspect = not any(other.history.deaths for other in suspects)
        else:
            return True
        return job.suspect

    async def record_attempt(self, job: Job, log_len: int) -> None:
        number, now_ms = job.delivery.attempt, self._bus.now_ms()
        model = subjects.model_of_stage(job.delivery.subject)
        attempt = AttemptRecord(self._stage, self._worker, number, now_ms, log_len, model=model)
        job.attempts.append(attempt)
        await self._publish(job, attempt)

    async def record_outcome(self, job: Job, outcome: Literal["requeued", "failed"]) -> None:
        """Record that this worker's attempt ended without an answer."""
        ours = [a for a in job.attempts if a.worker == self._worker and a.outcome == "open"]
        if ours:
            job.attempts.append(replace(ours[-1], outcome=outcome))
            await self._publish(job, job.attempts[-1])

    def record_again(self) -> None:
        """Write the records of this worker's attempts again, after the broker has lost them.

        Other workers then leave these requests to this worker.
        """
        for job in self._jobs.values():
            self._start(self._record_again(job))

    async def _record_again(self, job: Job) -> None:
        # Without a broker, the next one to start has lost the records as well.
        with contextlib.suppress(Unavailable):
            # An outcome may be appended meanwhile.
            for attempt in job.attempts:
                if attempt.worker == self._worker:
                    await self._publish(job, attempt)

    async def leave(self, job: Job, error: UnsupportedVersion) -> None:
        """Return a job to its queue for a newer worker. This does not count as an attempt."""
        attempt = job.delivery.attempt
        try:
            await self.record_outcome(job, "requeued")
            # Records of deliveries 1, 2, 4, 8 … are enough, and leave room for other records.
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
