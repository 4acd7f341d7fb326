"""The life of a job in a stage: claim it, then forward, answer, retry, requeue or give it up.

A stage publishes the next task with a fixed message id, waits for the publish ack, and only then
acknowledges its input. After a crash in between, the input is delivered again, and the broker
recognises the second publish as a duplicate.
"""

import asyncio
import contextlib
import random
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import structlog
from msgspec import Struct
from msgspec.structs import replace

from shared.blobs.store import Blobs, release_by_broker
from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.bus.reading import StoredMessage
from shared.codec.envelope import TensorData
from shared.config.schema import DeliveryConfig
from shared.errors import (
    BlobLost,
    DecodeError,
    Fenced,
    PagemillError,
    UnsupportedVersion,
    WorkerFailure,
)
from shared.protocol import subjects
from shared.protocol.encoding import to_msgpack
from shared.protocol.messages import DeadLetter
from shared.protocol.multimodal import BlobRef
from shared.protocol.pipeline import TEXT, Pipeline
from shared.protocol.records import OutputEnd, OutputSummary, StageSpan, error_info
from shared.protocol.task_messages import EngineBody, TaskHeader
from shared.stage import retry, tasks
from shared.stage.job import ClaimedJobs, Job, StageCounters, request_is_settled
from shared.state import output_ends
from shared.state.log_records import is_final
from shared.state.token_log import LogWriter, cut_outputs, end_request, finish_request, last_record
from shared.telemetry.metrics import Metrics
from shared.tenants.storage_quotas import has_exceeded

_log = structlog.get_logger()

# Pause of a suspect while the worker runs another suspect.
SUSPECT_PAUSE_S = 0.5

# The end of a traceback is the most useful part. All fields of a dead letter except for the request
# and the input fit into MAX_LETTER_BYTES.
MAX_TRACEBACK_LEN = 16_384
MAX_LETTER_BYTES = 65_536
MAX_HISTORY = 16

T = TypeVar("T")


class Stage:
    """One stage in one worker: claims and settles the stage's jobs."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        worker: str,
        version: str,
        policy: DeliveryConfig,
        metrics: Metrics,
        pipelines: Mapping[str, Pipeline],
        blobs: Blobs | None = None,
    ) -> None:
        self.bus = bus
        self.name = name
        self.worker = worker
        self.version = version
        self.policy = policy
        self.metrics = metrics
        self.pipelines = pipelines
        self.blobs = blobs
        """Payload store of a worker that reads or writes large payloads."""
        self.counters = StageCounters(bus, metrics)
        self.claims = ClaimedJobs(bus, name, worker, policy)

    # -- claiming ---------------------------------------------------------------------------

    def receive(self, delivery: Delivery) -> Job | None:
        """Return a new job, or None if this worker has a job of the request; see ClaimedJobs.

        The request id comes from the subject, because the message may be undecodable.
        """
        request_id = subjects.last_token(delivery.subject)
        return self.receive_job(Job(delivery, self.bus.now_ms(), request_id))

    def receive_job(self, new: Job) -> Job | None:
        """Do the same for a job with a request id that is not in its subject."""
        job = self.claims.receive(new)
        if job is not None:
            self.counters.arrived(job)
        return job

    def span(self, job: Job) -> StageSpan:
        """Return this stage's entry in the path of the request; it ends now."""
        now_ms = self.bus.now_ms()
        return StageSpan(self.name, self.worker, job.delivery.attempt, job.received_ms, now_ms)

    async def claim(self, job: Job) -> LogWriter | None:
        """Record that this worker has the job, and open the log of this stage's output.

        Return None if the job is settled: the request or the output has ended, or the job is put
        off because another worker has the request, or it is a suspect, or may be one. Raises
        Poisoned or WorkerFailure if the job must not be tried again, and LogTruncated if a part of
        its log has been removed.
        """
        request_id = _not_none(job.request_id)
        self.claims.add(job)
        attempt, output = job.delivery.attempt, self._output_of(job)
        is_first = attempt == 1 and not self.claims.may_be_held(job)
        if is_first and self._writes_new_log(job):
            await self.claims.record_attempt(job, log_len=0)
            job.log = LogWriter(self.bus, request_id, attempt, output, stored=())
            return job.log
        opening = asyncio.create_task(LogWriter.open(self.bus, request_id, attempt, output))
        try:
            if is_first:
                # There are no earlier attempts to read first.
                await self.claims.record_attempt(job, log_len=0)
            job.log = log = await opening
        finally:
            opening.cancel()
        if log.closed or (log.output != TEXT and is_final(await last_record(self.bus, request_id))):
            await self._settle_ended(job, log)
            return None
        if not is_first:
            is_free = await self.claims.load_history(
                job, len(log.records), written_ms=log.stored_ms
            )
            if not is_free or not self.claims.may_begin(job):
                self.claims.release(job)
                await job.delivery.retry(SUSPECT_PAUSE_S * (1 + random.random()))
                return None
            await self.claims.record_attempt(job, log_len=len(log.records))
        return log

    def _output_of(self, job: Job) -> str:
        """Return the output that this stage writes; the request's text if it has none."""
        pipeline = self._pipeline_of(job)
        spec = None if pipeline is None else pipeline.stage(self.name)
        return TEXT if spec is None or spec.output is None else spec.output.name

    def _writes_new_log(self, job: Job) -> bool:
        """Return whether the log of a job that is delivered first need not be read.

        The log is empty, unless the request has ended since the task was stored. Then the first
        append of the stage that writes the text is refused. Stages without an output append
        nothing, and would forward the task. The other outputs of a request may take long until
        their first append.
        """
        header = job.header
        if header is None or header.round or not _is_text_alone(header):
            return False
        pipeline = self.pipelines.get(header.model)
        writer = None if pipeline is None else pipeline.outputs.get(TEXT)
        return writer is not None and writer.name == self.name

    def _pipeline_of(self, job: Job) -> Pipeline | None:
        """Return the part of the model's pipeline that makes the outputs of the job's request."""
        pipeline = self.pipelines.get(subjects.model_of_stage(job.delivery.subject))
        if pipeline is None or job.header is None:
            return pipeline
        return pipeline.part_for(job.header.outputs, text_given=job.header.text_given)

    async def _settle_ended(self, job: Job, log: LogWriter) -> None:
        """Settle a job whose output or request has ended before this delivery."""
        last = next((record for record in log.records if is_final(record)), None)
        if isinstance(last, OutputEnd) and not last.cut:
            # The worker that wrote the record may have died before it noted the end. In a new
            # round, the followers must start again.
            await self.start_followers(job)
            await self._note_end(job, log.output, last.summary)
        elif isinstance(last, OutputEnd):
            # The worker that cut the output may have died before it ended the request.
            error = WorkerFailure("the request was ended before this output was complete")
            await self._end_with_error(job, error, job.path)
        else:
            await self.finish(job)

    # -- forwarding -------------------------------------------------------------------------

    async def forward(
        self,
        job: Job,
        result: Struct,
        tensors: Sequence[TensorData] = (),
        *,
        detour: bool = False,
    ) -> None:
        """Publish the tasks of the stages that follow, then acknowledge the input.

        With `detour`, only the task of the detour's stage is published. Payloads of the input that
        are also in the result then belong to the next task.
        """
        header = self._next_header(job)
        pipeline = _not_none(self._pipeline_of(job))
        edge_of_detour = pipeline.detour_from(self.name) if detour else None
        edges = pipeline.onward_edges(self.name) if edge_of_detour is None else [edge_of_detour]
        for edge in edges:
            passed = tasks.common_payloads(result, job.inputs)
            num_slots = pipeline.slots_of(edge.target)
            payloads = [*job.outputs, *passed]
            if await tasks.publish(self.bus, edge, header, result, tensors, payloads, num_slots):
                job.outputs.clear()
            elif passed:
                # An earlier attempt may have stored a task with the same payloads.
                passed = await tasks.stored_payloads(self.bus, edge, header, result, num_slots)
            job.inputs = [ref for ref in job.inputs if ref not in passed]
        if job.ended and is_final(await last_record(self.bus, header.request_id)):
            # These tasks may have been stored after the others of the request were removed.
            await leave_queues(self.bus, job)
        await self._acknowledge(job)

    async def start_followers(self, job: Job) -> None:
        """Publish the tasks of the stages that follow this stage's output while it grows."""
        pipeline = self._pipeline_of(job)
        if pipeline is None:
            return
        for edge in pipeline.followers_of(self.name):
            header = self._next_header(job)
            body = await tasks.publish_follower(
                self.bus, pipeline, edge, header, job.body, job.tensors
            )
            # A follower reads the payloads after this stage, so it releases them.
            passed = tasks.common_payloads(body, job.inputs)
            job.inputs = [ref for ref in job.inputs if ref not in passed]

    def _next_header(self, job: Job) -> TaskHeader:
        """Return the header for the next stages, with this stage added to the path."""
        return replace(_not_none(job.header), path=[*job.path, self.span(job)])

    async def discard_outputs(self, job: Job) -> None:
        """Release payloads that were made for a next stage and are not part of a stored task."""
        await self._release_payloads(job.outputs)

    async def rerender(self, job: Job, lost: BlobLost) -> None:
        """Publish the tasks of a new round, to make a lost payload again from the stored request.

        The first stages get their tasks again, with the number of the next round. Raises `lost` if
        the request has left its queue, or has had too many rounds.
        """
        header, pipeline = job.header, self._pipeline_of(job)
        if header is None or header.ticket is None or pipeline is None:
            raise lost
        request = await request_queue.queued_request(self.bus, header.ticket.place)
        edges = pipeline.restart_edges(self.name)
        if request is None or not edges or header.round >= self.policy.max_deliver:
            raise lost
        next_header = replace(self._next_header(job), round=header.round + 1)
        _log.warning("rerendered", request_id=header.request_id, round=next_header.round)
        prompt = tasks.prompt_of_queued(request)
        await self.close_attempt(job)
        for edge in edges:
            await tasks.publish(self.bus, edge, next_header, prompt)
        await self._acknowledge(job)

    # -- settling ---------------------------------------------------------------------------

    async def end_output(
        self, job: Job, summary: OutputSummary, on_end: Callable[[], None] | None = None
    ) -> None:
        """Write the end of this stage's output, and settle the job.

        The stage that ends the last output of a request ends the request. `on_end` is called when
        the end is in the log, before the job is acknowledged.
        """
        log = _not_none(job.log)
        # In a new round the log may be complete, but the followers must start again.
        await log.begin()
        summary = replace(summary, path=[*job.path, self.span(job)])
        alone = _is_text_alone(_not_none(job.header))
        if alone:
            await log.finish(summary, {})
        elif log.output != TEXT:
            await log.end(summary)
        if on_end is not None:
            on_end()
        if alone:
            await self.finish(job)
        else:
            await self._note_end(job, log.output, summary)

    async def _note_end(self, job: Job, output: str, summary: OutputSummary) -> None:
        request_id = _not_none(job.request_id)
        ends = await output_ends.add(self.bus, request_id, output, summary)
        if output_ends.is_complete(ends):
            await finish_request(self.bus, request_id, job.delivery.attempt, ends.ended)
            await self.finish(job)
        else:
            await self._acknowledge(job)

    async def finish_item(self, job: Job) -> None:
        """Settle an item task after its result was published.

        The records of its attempts are removed. They succeeded, and must not count against a later
        task of the same name when their workers have stopped.
        """
        await self.bus.purge(subjects.ATTEMPTS_STREAM, subjects.attempts(_not_none(job.request_id)))
        await self.finish(job)

    async def finish(self, job: Job) -> None:
        """Acknowledge the request and the job. The request's log has its final record."""
        if await request_is_settled(self.bus, job):
            # The job comes last. If the request could not be acknowledged, or this worker dies
            # here, the job is delivered again, and its worker repeats this for the ended request.
            await self._acknowledge(job)
        else:
            self.drop(job)

    async def _acknowledge(self, job: Job) -> None:
        # The job comes last. If this worker dies here, the next worker of the job releases them.
        await self._release_payloads(job.inputs)
        await job.delivery.ack()
        self.counters.handled(job)
        # The job may have been delivered again meanwhile, with another delivery than this one.
        self.drop(job)

    async def close_attempt(self, job: Job) -> None:
        """Record that this attempt ends without an answer, and does not count as a failure."""
        await self.claims.record_outcome(job, "requeued")

    async def requeue(self, job: Job, after_s: float = 0.0) -> None:
        """Return the job to its queue. The attempt does not count as a failure."""
        try:
            await self.close_attempt(job)
        finally:
            self.claims.release(job)
            await job.delivery.retry(after_s)

    def drop(self, job: Job) -> None:
        """Drop the job without a reply. Another worker has it, or gets it after the ack wait."""
        self.claims.release(job)
        job.delivery.abandon()

    async def fail(self, job: Job, error: Exception) -> None:
        """Retry or end a failed job by the retry policy. Never raises.

        If that fails, the broker is unavailable. It delivers the message again after the ack wait.
        """
        try:
            if isinstance(error, UnsupportedVersion) and not error.reported:
                await self.claims.leave(job, error)
            else:
                await self._settle_failure(job, error)
        except Exception:
            _log.exception("unsettled", request_id=job.request_id, attempt=job.delivery.attempt)
            self.drop(job)

    async def _settle_failure(self, job: Job, error: Exception) -> None:
        # The messages of other exceptions may contain paths, so the client does not get them.
        unknown = WorkerFailure("a worker failed on this request")
        cause = error if isinstance(error, PagemillError) else unknown
        log = _log.bind(request_id=job.request_id, attempt=job.delivery.attempt)
        if isinstance(cause, Fenced) and not cause.reported:
            log.warning("fenced", reason=cause.message)
            await self.yield_ownership(job)
            return
        decision = retry.decide(cause, job.history.failures, self.policy, random.random())
        log.warning(
            "failed",
            code=cause.code,
            reason=cause.message,
            decision=type(decision).__name__,
            exc_info=error if cause.fault == "server" else None,
        )
        match decision:
            case retry.RetryLater(after_s, failed):
                self.counters.retried(job, cause)
                await self.claims.record_outcome(job, "failed" if failed else "requeued")
                self.claims.release(job)
                await job.delivery.retry(after_s)
                return
            case retry.GiveUp():
                await self.write_dead_letter(job, cause, error)
                self.counters.given_up(job, cause)
            case retry.AnswerWithError():
                pass
        self.counters.ended_with(cause)
        await self._end_with_error(job, cause, [*job.path, self.span(job)])

    async def write_dead_letter(self, job: Job, cause: PagemillError, error: Exception) -> None:
        """Store a dead letter with the job's input and its request, and wait for the publish ack.

        The letter has neither if the tenant's letters take too much of their stream.
        """
        delivery, place = job.delivery, job.request_place
        queued = None if place is None else await request_queue.queued_request(self.bus, place)
        if queued is not None:
            request = queued.data
        else:
            request = delivery.data if job.request_id is None else b""
        tenant = job.tenant if queued is None else queued.tenant
        content = delivery.data
        if await has_exceeded(self.bus, tenant, subjects.DEAD_STREAM):
            # Other quotas refuse the tenant's requests instead. Dead letters never expire.
            request = content = b""
        # Each of the two fits into a message, but both together may not.
        room = self.bus.max_payload - MAX_LETTER_BYTES
        request = request if len(request) <= room else b""
        room -= len(request)
        letter = DeadLetter(
            role=self.name,
            worker=self.worker,
            version=self.version,
            subject=delivery.subject,
            request_id=job.request_id,
            attempts=delivery.attempt,
            error=error_info(cause),
            traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK_LEN:],
            history=job.attempts[-MAX_HISTORY:],
            request=request,
            input=content[:room],
            input_len=len(delivery.data),
            failed_ms=self.bus.now_ms(),
            tenant=tenant,
        )
        name = job.request_id or f"unnamed-{delivery.sequence}"
        await self.bus.publish(
            subjects.dead(self.name, name),
            to_msgpack(letter),
            f"dead:{name}:{delivery.subject}:{delivery.sequence}",
            tenant,
        )

    async def _end_with_error(self, job: Job, error: PagemillError, path: list[StageSpan]) -> None:
        if job.end is not None:
            await job.end(job, error)
            await self.finish(job)
            return
        has_ended = await end_with_error(self.bus, job, self._output_of(job), error, path)
        await (self.finish(job) if has_ended else self._acknowledge(job))

    async def yield_ownership(self, job: Job) -> None:
        """Finish a job if its request has ended; otherwise another worker has it, so drop it."""
        if is_final(await last_record(self.bus, _not_none(job.request_id))):
            await self.finish(job)
        else:
            self.drop(job)

    async def _release_payloads(self, refs: list[BlobRef]) -> None:
        if refs and self.blobs is not None:
            await asyncio.gather(*(self.blobs.release(ref) for ref in refs))
            refs.clear()


def _not_none(value: T | None) -> T:
    assert value is not None
    return value


def _is_text_alone(header: TaskHeader) -> bool:
    """Return whether a task belongs to a request without any other output than its text."""
    return header.ticket is not None and header.outputs in ([], [TEXT])


async def settle(
    bus: Bus, request_id: str, end: Callable[[], Awaitable[object]], held: Delivery | None = None
) -> None:
    """End a request by `end`, and remove it and its tasks from their queues.

    The message `held` stays until the caller acknowledges it, so that it is delivered again if this
    worker dies. The others are removed before a client sees the end.
    """
    removed = await _remove(bus, request_id, held)
    await end()
    await bus.notify(subjects.ended(request_id))
    # A task may have been stored in the meantime. A task that is stored from now on is removed by
    # the coordinator or the stage that stores it, because the request has ended.
    removed += await _remove(bus, request_id, held)
    await _release_payloads(bus, removed)


async def leave_queues(bus: Bus, job: Job) -> None:
    """Remove the request of `job`, which has ended, and its other tasks from their queues."""
    assert job.request_id is not None
    await _release_payloads(bus, await _remove(bus, job.request_id, job.delivery))


async def _remove(bus: Bus, request_id: str, held: Delivery | None) -> list[StoredMessage]:
    """Remove a request and its tasks, except for the message `held`. Return the tasks.

    The tasks contain the request's position in its queue. A request without a task waits for its
    admission, which removes a request that has ended.
    """
    stored = await bus.read(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    removed = [task for task in stored if held is None or task.subject != held.subject]
    places = {subjects.place_of(task.msg_id or "", request_id) for task in removed}
    if held is not None and subjects.is_request(held.subject):
        places.discard(held.place)
    # The tasks come last, so that they are found again if this worker dies here.
    for place in places:
        if place is not None:
            await bus.delete(*place)
    for task in removed:
        await bus.delete(subjects.STAGES_STREAM, task.sequence)
    return removed


async def _release_payloads(bus: Bus, removed: list[StoredMessage]) -> None:
    # After the end, because a worker that misses a payload would start a new round.
    payloads = [ref for task in removed for ref in _payloads_of(task)]
    await asyncio.gather(*(release_by_broker(bus, ref) for ref in payloads))


def _payloads_of(task: StoredMessage) -> list[BlobRef]:
    """Return the payloads of an engine's task; other tasks have none."""
    with contextlib.suppress(DecodeError, UnsupportedVersion):
        return tasks.decode(task.data, EngineBody)[0].body.blobs()  # type: ignore[no-any-return]
    return []


async def end_with_error(
    bus: Bus, job: Job, output: str, error: PagemillError, path: list[StageSpan]
) -> bool:
    """End the request of a job with an error, or only its outputs if the text may continue.

    Return whether the request has ended. Otherwise the stage of the text ends it.
    """
    request_id, attempt = job.request_id, job.delivery.attempt
    if request_id is None:
        return True
    may_continue = job.header is not None and job.header.on_late == "text" and output != TEXT
    if may_continue:
        return await cut_outputs(bus, request_id, attempt, error, path)

    async def end() -> None:
        await end_request(bus, request_id, attempt, error, path)

    await (settle(bus, request_id, end, job.delivery) if _may_have_other_tasks(job) else end())
    return True


def _may_have_other_tasks(job: Job) -> bool:
    if not subjects.is_stage(job.delivery.subject):
        return job.delivery.attempt > 1
    return job.header is None or not _is_text_alone(job.header)
