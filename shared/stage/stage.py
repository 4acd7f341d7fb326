"""How a stage takes work in hand and settles it: hand on, answer, retry, hand back, dead letter.

The hand-over rule: publish the next message under an id of its own, wait for the publish ack, and
only then acknowledge the input. A crash in between is a redelivery whose publish is recognised.
"""

import asyncio
import random
import traceback
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import structlog
from msgspec.structs import replace

from shared.blobs.store import Blobs
from shared.bus.bus import DEAD_AFTER_S, Bus
from shared.bus.consumer import Delivery
from shared.config import DeliveryConfig
from shared.errors import BlobLost, Fenced, PagemillError, Unavailable, WorkerFailure
from shared.protocol import subjects
from shared.protocol.messages import (
    AttemptRecord,
    DeadLetter,
    EngineTask,
    RenderTask,
    RequestTicket,
    StageSpan,
    decode_attempt,
    decode_request,
    error_info,
    to_json,
    to_msgpack,
)
from shared.protocol.multimodal import BlobRef
from shared.protocol.prompts import prompt_of
from shared.stage import retry
from shared.stage.retry import NO_HISTORY
from shared.state.token_log import LogWriter, end_request, is_final, last_record
from shared.telemetry.metrics import Metrics

_log = structlog.get_logger()

# The end of a traceback tells most. What surrounds the input in a dead letter fits into the second.
MAX_TRACEBACK_LEN = 16_384
MAX_LETTER_BYTES = 65_536

# Of a worker whose heartbeat comes every second: it has just been heard.
ALIVE_S = 1.5
# How long a suspect waits for its turn to be alone in a worker.
SUSPECT_PAUSE_S = 0.5
# How long what was made again waits while the same worker still has what was lost.
AGAIN_PAUSE_S = 0.5


Known = TypeVar("Known")


class Task(Protocol):
    """What every stage's message says of its request."""

    @property
    def accepted(self) -> RequestTicket: ...
    @property
    def path(self) -> list[StageSpan]: ...


@dataclass(slots=True, eq=False)
class Job:
    """A delivery in hand, and what is known of its request so far."""

    delivery: Delivery
    received_ms: float
    request_id: str | None
    """None for a message that does not tell; it can only become a dead letter."""
    accepted: RequestTicket | None = None
    path: list[StageSpan] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    """Records of earlier attempts, and of this one."""
    history: retry.History = NO_HISTORY
    suspect: bool = False
    """A worker has died with it in hand, and it has not shown yet that it was not the cause."""
    waiting: bool = False
    """It has not begun; progress of others is progress towards it."""
    inputs: list[BlobRef] = field(default_factory=list)
    """Payloads that came with it; released when it is acknowledged, and never before."""
    outputs: list[BlobRef] = field(default_factory=list)
    """Payloads made for the next stage. They are ours to take back until its message is stored."""

    @property
    def request_sequence(self) -> int | None:
        """Where the request is in its queue: what cannot be read still has a message id."""
        if self.accepted is not None:
            return self.accepted.sequence
        if self.request_id is None or not subjects.is_stage(self.delivery.subject):
            return None
        return subjects.sequence_of(self.delivery.msg_id or "", self.request_id)

    def identify(self, task: Task) -> None:
        """The message has been read."""
        self.accepted = task.accepted
        self.path = task.path


class Stage:
    """The identity under which a worker takes and settles its jobs."""

    def __init__(
        self,
        bus: Bus,
        role: str,
        worker: str,
        version: str,
        policy: DeliveryConfig,
        metrics: Metrics | None = None,
    ) -> None:
        self.bus = bus
        self.role = role
        self.worker = worker
        self.blobs: Blobs | None = None
        """Of a worker that has to do with large payloads."""
        self.metrics = metrics or Metrics(role, worker)
        self._version = version
        self._policy = policy
        self._in_hand: dict[str, Job] = {}
        self._last_progress_ms = 0.0
        self._telling: set[asyncio.Task[None]] = set()

    # -- taking -----------------------------------------------------------------------------

    def receive(self, delivery: Delivery) -> Job | None:
        """A job whose request id comes from the subject: its message may prove unreadable.

        None when this worker has the job in hand already, which is then settled by this delivery:
        the broker has restarted, or progress was told too late. A job that hangs shows none of it
        for this delivery either, so it comes again, and in the end to somebody else.

        None as well for what has been made again while this worker still has in hand what was lost:
        it is put off until that is over.
        """
        request_id = subjects.last_token(delivery.subject)
        held = self._in_hand.get(request_id)
        if held is None:
            job = Job(delivery, self.bus.now_ms(), request_id)
            self.count_arrival(job)
            return job
        if delivery.sequence != held.delivery.sequence:
            self._start(delivery.retry(AGAIN_PAUSE_S))
            return None
        held.delivery.abandon()
        held.delivery = delivery
        return None

    def count_arrival(self, job: Job) -> None:
        metrics = self._metrics_of(job)
        if job.delivery.attempt > 1:
            metrics.counter("stage_redeliveries_total").add()
        else:
            waited_s = max(0.0, job.received_ms - job.delivery.stored_ms) / 1000
            metrics.histogram("stage_queue_seconds").observe(waited_s)

    def count_handled(self, job: Job) -> None:
        took_s = (self.bus.now_ms() - job.received_ms) / 1000
        self._metrics_of(job).histogram("stage_handling_seconds").observe(took_s)

    def count_error(self, cause: PagemillError) -> None:
        """This worker has ended a request with an error."""
        self.metrics.counter("request_errors_total", code=cause.code).add()

    def _metrics_of(self, job: Job) -> Metrics:
        return self.metrics.of(subjects.model_of_stage(job.delivery.subject))

    def progressed(self, jobs: Iterable[Job]) -> None:
        """Tell the broker, a few times within the ack wait, that these jobs are advancing."""
        now_ms = self.bus.now_ms()
        if now_ms - self._last_progress_ms > 1000 * self._policy.ack_wait_s / 4:
            self._last_progress_ms = now_ms
            for job in jobs:
                self._start(job.delivery.progress())

    def _start(self, telling: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self._in_hand.values() if job.waiting]

    def span(self, job: Job) -> StageSpan:
        """This stage's entry in the request's path, as of now."""
        return StageSpan(
            self.role, self.worker, job.delivery.attempt, job.received_ms, self.bus.now_ms()
        )

    async def claim(self, job: Job) -> LogWriter | None:
        """Take the job in hand: leave a record of that, and open its token log.

        None when there is nothing to do here and the job is settled: the request has ended, it is
        a suspect that has to wait, or it is not known yet whether it is one. Raises Poisoned or
        WorkerFailure when it must not be tried again, LogTruncated when its log is not whole.
        """
        request_id = _known(job.request_id)
        self._in_hand[request_id] = job
        opening = asyncio.create_task(LogWriter.open(self.bus, request_id, job.delivery.attempt))
        try:
            if job.delivery.attempt == 1:
                # Nothing has happened yet that would have to be known first.
                await self._record(job, log_len=0)
            log = await opening
        finally:
            opening.cancel()
        if log.closed:
            await self.finish(job)
            return None
        if job.delivery.attempt > 1:
            known = await self._load_history(job, len(log.records))
            if not known or not self.may_begin(job):
                self._release(job)
                await job.delivery.retry(SUSPECT_PAUSE_S * (1 + random.random()))
                return None
            await self._record(job, log_len=len(log.records))
        return log

    async def _load_history(self, job: Job, log_len: int) -> bool:
        """Look at what became of earlier attempts. Raises when there must not be another.

        False while it cannot be told yet whether a worker that had it is dead.
        """
        request_id = _known(job.request_id)
        stored = await self.bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
        job.attempts = [decode_attempt(message.data) for message in stored]
        workers = {a.worker for a in job.attempts if a.role == self.role and a.outcome == "open"}
        others = sorted(workers - {self.worker})
        silences = await asyncio.gather(*(self.bus.heartbeat_lag_s(w, self.worker) for w in others))
        if any(ALIVE_S < silence_s <= DEAD_AFTER_S for silence_s in silences):
            return False
        dead = {w for w, silence_s in zip(others, silences, strict=True) if silence_s > ALIVE_S}
        job.history = retry.recount(job.attempts, self.role, log_len, dead)
        if (error := retry.verdict(job.history, self._policy)) is not None:
            raise error
        return True

    def may_begin(self, job: Job) -> bool:
        """One suspect at a time: if this worker dies too, it is known of which request."""
        if job.history.suspect:
            job.suspect = not any(
                other.suspect for other in self._in_hand.values() if other is not job
            )
            return job.suspect
        return True

    async def _record(self, job: Job, log_len: int) -> None:
        attempt = AttemptRecord(
            self.role, self.worker, job.delivery.attempt, self.bus.now_ms(), log_len
        )
        job.attempts.append(attempt)
        subject = subjects.attempts(_known(job.request_id))
        await self.bus.publish_without_id(subject, to_json(attempt))

    # -- settling ---------------------------------------------------------------------------

    async def forward(
        self, job: Job, role: str, model: str, lane: str, data: bytes, round: int = 0
    ) -> None:
        """Publish `data` for the next stage, then acknowledge the input."""
        await self.publish(job, role, model, lane, data, round)
        await self._acknowledge(job)

    async def publish(
        self, job: Job, role: str, model: str, lane: str, data: bytes, round: int = 0
    ) -> None:
        """Publish `data` for the next stage, once for each acceptance of the request and round.

        Raises Unavailable while the next stage's queue still has what it was given a round ago.
        """
        request_id, accepted = _known(job.request_id), _known(job.accepted)
        msg_id = subjects.stage_msg_id(role, request_id, accepted.sequence, round)
        subject = subjects.stage(role, model, lane, request_id)
        was_there = await self.bus.publish(subject, data, msg_id)
        if was_there and (round > 0 or job.outputs):
            stored = await self.bus.read_last(subjects.STAGES_STREAM, subject)
            if round > 0 and stored is not None and stored.msg_id != msg_id:
                raise Unavailable("what was lost is still in the queue")
            if round > 0 and stored is None:
                # What was in the way may have gone since; what is known is refused once more.
                was_there = await self.bus.publish(subject, data, msg_id)
            if was_there and (stored is None or stored.data != data):
                # Somebody has done this before, with payloads of their own.
                return
        job.outputs.clear()

    async def discard_outputs(self, job: Job) -> None:
        """Release what was made for the next stage, and has not been handed over."""
        await self._release_payloads(job.outputs)

    async def rerender(self, job: Job, task: EngineTask, lost: BlobLost) -> None:
        """Have what is lost made again, from the request as it was accepted.

        Raises `lost` when that cannot be done, or has been done too often.
        """
        request = await self.bus.get_queued_request(task.accepted.sequence)
        if request is None or task.round >= self._policy.max_deliver:
            raise lost
        again = RenderTask(
            request_id=task.request_id,
            model=task.model,
            lane=task.lane,
            prompt=prompt_of(decode_request(request.data)),
            sampling_params=task.sampling_params,
            accepted=task.accepted,
            path=[*task.path, self.span(job)],
            round=task.round + 1,
            adapter=task.adapter,
        )
        _log.warning("sent_back", request_id=task.request_id, round=again.round)
        data = to_msgpack(again)
        await self.close_attempt(job)
        await self.forward(job, "renderer", task.model, task.lane, data, again.round)

    async def finish(self, job: Job) -> None:
        """The request has ended: its log has the final record. Nothing of it is to come again."""
        if await self._request_is_settled(job):
            # The job last: if the request could not be acknowledged, or we die here, the job comes
            # again to somebody who finds that the request has ended, and tries this once more.
            await self._acknowledge(job)
        else:
            self.drop(job)

    async def _request_is_settled(self, job: Job) -> bool:
        """Whether the request has left its queue, by its receipt if need be."""
        accepted = job.accepted
        if accepted is None:
            # Without its receipt it can only be removed.
            if job.request_sequence is not None:
                await self.bus.delete(subjects.REQUESTS_STREAM, job.request_sequence)
            return True
        if accepted.receipt == job.delivery.receipt:
            return True
        if await self.bus.acknowledge(accepted.receipt):
            return True
        # A server that was cut off may have given out a receipt that its successor has never heard
        # of. What is still in the queue then comes to a coordinator again, and leaves it there.
        try:
            return await self.bus.get_queued_request(accepted.sequence) is None
        except Unavailable:
            return False

    async def _acknowledge(self, job: Job) -> None:
        # The job last: if we die here, it comes again to somebody who releases them.
        await self._release_payloads(job.inputs)
        await job.delivery.ack()
        self.count_handled(job)
        # It may have come again meanwhile, in place of the delivery that is acknowledged now.
        self.drop(job)

    async def close_attempt(self, job: Job) -> None:
        """This attempt ends without an answer, and through no fault of the job's."""
        await self._record_outcome(job, "handed_back")

    async def requeue(self, job: Job, after_s: float = 0.0) -> None:
        """Give the job back without a fault of its own; another worker goes on with it."""
        try:
            await self.close_attempt(job)
        finally:
            self._release(job)
            await job.delivery.retry(after_s)

    def drop(self, job: Job) -> None:
        """Leave the job without a word: it is another's already, or will be after the ack wait."""
        self._release(job)
        job.delivery.abandon()

    async def fail(self, job: Job, error: Exception) -> None:
        """Decide by the retry policy and carry it out; never raises.

        When not even that succeeds the broker is away: the message comes again after its ack wait.
        """
        try:
            await self._settle_failure(job, error)
        except Exception:
            _log.exception("unsettled", request_id=job.request_id, attempt=job.delivery.attempt)
            self.drop(job)

    async def _settle_failure(self, job: Job, error: Exception) -> None:
        cause = error if isinstance(error, PagemillError) else _as_failure(error)
        log = _log.bind(request_id=job.request_id, attempt=job.delivery.attempt)
        if isinstance(cause, Fenced):
            log.warning("fenced", reason=cause.message)
            await self.yield_ownership(job)
            return
        decision = retry.decide(
            cause,
            job.history.failures,
            self._policy,
            random.random(),
        )
        log.warning(
            "failed",
            code=cause.code,
            reason=cause.message,
            decision=type(decision).__name__.lower(),
            exc_info=error if cause.fault == "server" else None,
        )
        match decision:
            case retry.RetryLater(after_s, failed):
                self._metrics_of(job).counter("stage_retries_total", code=cause.code).add()
                await self._record_outcome(job, "failed" if failed else "handed_back")
                self._release(job)
                await job.delivery.retry(after_s)
                return
            case retry.GiveUp():
                await self._write_dead_letter(job, cause, error)
                self._metrics_of(job).counter("stage_dead_letters_total", code=cause.code).add()
            case retry.AnswerWithError():
                pass
        if job.request_id is not None:
            path = [*job.path, self.span(job)]
            await end_request(self.bus, job.request_id, job.delivery.attempt, cause, path)
        self.count_error(cause)
        await self.finish(job)

    async def yield_ownership(self, job: Job) -> None:
        """Another has ended the request, or has it in hand: its log knows which."""
        record = await last_record(self.bus, _known(job.request_id))
        if record is not None and is_final(record):
            await self.finish(job)
        else:
            self.drop(job)

    async def _record_outcome(self, job: Job, outcome: Literal["handed_back", "failed"]) -> None:
        ours = [a for a in job.attempts if a.worker == self.worker and a.outcome == "open"]
        if ours:
            closed = replace(ours[-1], outcome=outcome)
            subject = subjects.attempts(_known(job.request_id))
            await self.bus.publish_without_id(subject, to_json(closed))

    async def _write_dead_letter(self, job: Job, cause: PagemillError, error: Exception) -> None:
        delivery, sequence = job.delivery, job.request_sequence
        queued = None if sequence is None else await self.bus.get_queued_request(sequence)
        if queued is not None:
            request = queued.data
        else:
            request = delivery.data if job.request_id is None else b""
        known = job.accepted or queued
        # Neither alone exceeds the limit of a message; together they may.
        room = self.bus.max_payload - MAX_LETTER_BYTES
        request = request if len(request) <= room else b""
        room -= len(request)
        letter = DeadLetter(
            role=self.role,
            worker=self.worker,
            version=self._version,
            subject=delivery.subject,
            request_id=job.request_id,
            attempts=delivery.attempt,
            error=error_info(cause),
            traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK_LEN:],
            history=job.attempts[-16:],
            request=request,
            input=delivery.data[:room],
            input_len=len(delivery.data),
            failed_ms=self.bus.now_ms(),
            tenant="" if known is None else known.tenant,
        )
        name = job.request_id or f"unnamed-{delivery.sequence}"
        await self.bus.publish(
            subjects.dead(self.role, name),
            to_msgpack(letter),
            f"dead:{name}:{delivery.subject}:{delivery.sequence}",
        )

    async def _release_payloads(self, refs: list[BlobRef]) -> None:
        if refs and self.blobs is not None:
            await asyncio.gather(*(self.blobs.release(ref) for ref in refs))
            refs.clear()

    def _release(self, job: Job) -> None:
        if job.request_id is not None and self._in_hand.get(job.request_id) is job:
            del self._in_hand[job.request_id]


def _known(value: Known | None) -> Known:
    assert value is not None
    return value


def _as_failure(error: Exception) -> WorkerFailure:
    # The client learns that we failed, not how: our messages may hold paths and addresses.
    return WorkerFailure("a worker failed on this request")
