"""Coordinator: admits requests, publishes their first tasks, and ends them at their deadline.

A request stays in its queue until it has ended: the coordinator delays its message until the
deadline. If the message is delivered then, no worker has ended the request, and the coordinator
ends it. So the queue is the list of requests in flight, its limit bounds their number, and no
timer is lost with a process that dies.
"""

import asyncio
import contextlib
import math
from functools import partial
from weakref import WeakValueDictionary

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.bus.store_probes import REFUSING_STREAMS
from shared.bus.store_room import StoreRoom, measure_servers, report_room
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    DecodeError,
    InvalidRequest,
    PagemillError,
    Unavailable,
    UnsupportedVersion,
)
from shared.protocol import names, subjects
from shared.protocol.messages import decode_attempt
from shared.protocol.pipeline import TEXT
from shared.protocol.requests import OnLate
from shared.protocol.task_messages import RequestTicket, TaskHeader
from shared.protocol.versions import VERSION_HEADER, check_version, version_of
from shared.stage import tasks
from shared.stage.job import EndJob, Job
from shared.stage.retry import History
from shared.stage.runtime import Context
from shared.stage.stage import leave_queues, settle
from shared.stage.worker_loop import WorkerLoop, create_queues
from shared.state import output_ends
from shared.state.log_records import is_final
from shared.state.response_status import is_awaited
from shared.state.token_log import close_outputs, cut_outputs, end_request, last_record, repeat_end
from shared.tenants.storage_quotas import MEDIA_STREAMS, streams_filled_by
from workers.coordinator.admission import (
    Admitted,
    admit,
    deadline_ms,
    latest_deadline_ms,
    most_tokens,
)
from workers.coordinator.batch_orders import BatchOrders, id_of
from workers.coordinator.intake import Intake
from workers.coordinator.precedence import Precedence
from workers.coordinator.reading import Reading
from workers.coordinator.refused_stages import RefusedStages
from workers.coordinator.replica_watch import ReplicaWatch
from workers.coordinator.stage_waits import StageWaits
from workers.coordinator.storage_meter import StorageMeter
from workers.coordinator.store_watch import StoreWatch
from workers.coordinator.token_limits import TokenLimits
from workers.coordinator.traces import Traces
from workers.coordinator.turns import Turns

ID_RULE = f"the id of a request, the last token of its subject, {names.REQUEST_ID_RULE}"
# Time after a loss of all tasks in which workers connect again, notice the loss within a second,
# and record which requests they still have.
REJOIN_S = 1.5


async def main(context: Context) -> None:
    await Coordinator(context).serve()


class Coordinator:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._stage = context.stage
        self._delivery = context.config.delivery
        self._waits = StageWaits(context.bus)
        self._tokens = TokenLimits(context.bus, self._delivery.tokens_per_minute)
        self._turns = Turns(context.bus, self._delivery.tenant_weights)
        self._room = StoreRoom(context.bus)
        self._batches = BatchOrders(context, self._room)
        self._precedence = Precedence()
        self._traces = Traces(context)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By request id, held while a request is admitted."""

    async def serve(self) -> None:
        await create_queues(self._context)
        loop = WorkerLoop(self._context)
        handlers = (self._request_of, self.admit_or_end), (self._cancellation_of, self._cancel)
        intake = Intake(self._context, loop, *handlers)
        await intake.start()
        loop.start(StorageMeter(self._context.bus, self._delivery.tenant_weights).run())
        watch = StoreWatch(self._context.bus)
        self._context.metrics.set_function("streams_refusing", lambda: watch.num_refusing)
        loop.start(watch.run())
        reading = Reading(self._context.bus, self._delivery.tenant_reads, self._precedence)
        await reading.start()
        loop.start(self._traces.run())
        loop.start(ReplicaWatch(self._context.bus, self._context.metrics).run())
        models = self._context.config.models
        loop.start(RefusedStages(self._context.bus, models, self._context.metrics).run())
        self._context.metrics.set_function("full_stores", lambda: float(self._room.num_full))
        await self._room.find_error()  # Before the first request is admitted.
        loop.start(self._room.follow())
        measure = partial(measure_servers, self._context.bus, self._context.config.nats)
        loop.start(report_room(self._context.bus, measure))
        self._context.ready(
            sorted(self._context.config.models),
            lambda: {"held": loop.num_claimed, REFUSING_STREAMS: watch.num_refusing},
        )
        await loop.run()
        await reading.stop(self._delivery.drain_s)

    def _request_of(self, delivery: Delivery) -> Job:
        if subjects.is_batch_order(delivery.subject):
            return self._job(delivery, id_of(delivery), self._batches.refuse)
        request_id = _with_log(delivery, subjects.request_id_of(delivery.subject))
        is_from_client = bool(subjects.tenant_of_queue(delivery.place.stream))
        if is_from_client and request_id is not None and names.is_part_id(request_id):
            request_id = None  # The log of this id belongs to a part of another request.
        job = self._job(delivery, request_id)
        if delivery.attempt == 1:  # Later deliveries are its deadline, or follow a worker's death.
            self._stage.counters.arrived(job)
        return job

    def _cancellation_of(self, delivery: Delivery) -> Job:
        return self._job(delivery, _with_log(delivery, subjects.id_in(delivery.subject)))

    def _job(self, delivery: Delivery, request_id: str | None, end: EndJob | None = None) -> Job:
        # Attempts take milliseconds, so they are not recorded, and each delivery counts as one.
        # Deliveries to older coordinators that could not read the request do not count before its
        # latest possible deadline.
        is_late = (
            self._context.bus.now_ms() > delivery.stored_ms + 1000 * self._delivery.max_timeout_s
        )
        is_counted = is_late or VERSION_HEADER not in delivery.headers
        history = History(failures=delivery.attempt - 1 if is_counted else 0, deaths=0)
        return Job(delivery, self._context.bus.now_ms(), request_id, history=history, end=end)

    async def admit_or_end(self, job: Job) -> None:
        """Forward a request to its first stage, or end it. Raises an error for an invalid id.

        An order for a batch comes in the same queue.
        """
        if subjects.is_batch_order(job.delivery.subject):
            with self._precedence.urgent():
                await self._batches.carry_out(job)
            return
        request_id = _id_of(job)
        # Two requests with one id may name different models.
        async with self._locks.setdefault(request_id, asyncio.Lock()):
            with self._precedence.urgent():
                has_ended = await self._has_ended(job, request_id)
                if not has_ended:
                    await self._admit(job, request_id)
        if has_ended:
            # The client may have published its request again.
            await repeat_end(self._context.bus, request_id)

    async def _admit(self, job: Job, request_id: str) -> None:
        delivery, bus = job.delivery, self._context.bus
        _check_id(request_id)
        if await self._is_repeated(delivery, request_id):
            await delivery.ack()
            return
        trace = await self._traces.begin(job)
        if await self._has_expired_unread(job):
            return
        models, pipelines = self._context.config.models, self._context.pipelines
        admitted = admit(delivery.subject, request_id, delivery.data, models, pipelines)
        request, tenant = admitted.request, delivery.tenant
        lane = await self._turns.lane_of(admitted, tenant, len(delivery.data))
        if delivery.attempt == 1 and delivery.stored_ms >= bus.streams.tasks.since_ms:
            # Later attempts are not checked: the request may have been admitted before.
            await self._check_limits(job, request_id, admitted, lane)
        ticket = RequestTicket(
            accepted_ms=delivery.stored_ms,
            deadline_ms=deadline_ms(delivery.stored_ms, request.timeout_s, self._delivery),
            sequence=delivery.sequence,
            receipt=delivery.receipt,
            tenant=tenant,
            cache_salt=request.cache_salt or "",
            prompt_cache_key=request.prompt_cache_key or "",
            stream=delivery.place.stream,
            traceparent="" if trace is None else trace.traceparent,
            tracestate="" if trace is None else trace.state,
        )
        has_expired = await self._has_expired(job, ticket, request.on_late)
        if has_expired or await self._is_put_off(delivery, ticket):
            return
        job.header = TaskHeader(
            request_id=request_id,
            model=request.model,
            lane=lane,
            ticket=ticket,
            sampling=admitted.sampling,
            path=[self._stage.span(job)],
            adapter=request.adapter,
            outputs=admitted.outputs,
            embedding=request.embedding,
            text_given=request.given_text is not None,
            voice=admitted.voice,
            on_late=request.on_late,
            image=admitted.image,
        )
        if admitted.outputs:
            await output_ends.begin(bus, request_id, admitted.outputs)
        await self._publish_first(job, job.header, admitted)
        # A cancellation may have arrived before the outputs and tasks existed.
        if await self._has_ended(job, request_id):
            return
        await delivery.retry((ticket.deadline_ms - bus.now_ms()) / 1000)

    async def _has_expired(self, job: Job, ticket: RequestTicket, on_late: OnLate) -> bool:
        """Return whether the request has reached its deadline, and end it then."""
        if self._context.bus.now_ms() < ticket.deadline_ms:
            return False
        await self._expire(job, (ticket.deadline_ms - ticket.accepted_ms) / 1000, on_late)
        return True

    async def _is_put_off(self, delivery: Delivery, ticket: RequestTicket) -> bool:
        """Put a request off while it is unknown whether a worker has its task, which is lost."""
        now_ms, tasks = self._context.bus.now_ms(), self._context.bus.streams.tasks
        until_ms = tasks.created_ms + 1000 * REJOIN_S
        if delivery.attempt > 1 and math.isinf(tasks.since_ms):
            # Another coordinator may have created the stream of tasks again.
            until_ms = now_ms + 1000 * REJOIN_S
        elif ticket.accepted_ms >= tasks.created_ms:
            return False
        until_ms = min(until_ms, ticket.deadline_ms)
        if now_ms >= until_ms:
            return False
        await delivery.retry((until_ms - now_ms) / 1000)
        return True

    async def _is_repeated(self, delivery: Delivery, request_id: str) -> bool:
        """Return whether an earlier request with the same id is queued and has tasks.

        The broker refuses a second request with an id only if it names the same model and comes to
        the same queue. The request with tasks counts as the earlier one.
        """
        bus = self._context.bus
        task = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
        place = task and subjects.place_of(task.msg_id or "", request_id)
        if not place or (place.stream == delivery.place.stream and place >= delivery.place):
            return False
        queued = await request_queue.queued_request(bus, place)
        return queued is not None and queued.request_id == request_id

    async def _check_limits(self, job: Job, request_id: str, admitted: Admitted, lane: str) -> None:
        request = admitted.request
        disk_full = await self._room.find_error()
        # A response in flight needs its further turns and images.
        if disk_full is not None and not await is_awaited(self._context.bus, request_id):
            raise disk_full
        streams = MEDIA_STREAMS if admitted.image is not None else ()
        await self._context.quotas.check(job.tenant, (*streams_filled_by(request), *streams))
        pipeline = self._context.pipelines[request.model]
        written = (pipeline.outputs[name] for name in admitted.outputs)
        beside = [stage for stage in written if stage.output and stage.output.name != TEXT]
        await self._waits.check(request.model, beside, lane)
        await self._tokens.check(job.delivery.tenant, request_id, most_tokens(admitted))

    async def _has_expired_unread(self, job: Job) -> bool:
        """Return whether a request of a newer version has reached its deadline, and end it then.

        Raises UnsupportedVersion before the deadline, so that it is left to newer coordinators.
        """
        delivery = job.delivery
        try:
            check_version(version_of(delivery.headers), "this request")
        except UnsupportedVersion:
            late_ms = latest_deadline_ms(delivery.data, delivery.stored_ms, self._delivery)
            if self._context.bus.now_ms() < late_ms:
                raise
            await self._expire(job, (late_ms - delivery.stored_ms) / 1000, "fail")
            return True
        return False

    async def _has_ended(self, job: Job, request_id: str) -> bool:
        """Return whether the request has ended; if so, close its outputs and settle its message."""
        bus = self._context.bus
        if not is_final(await last_record(bus, request_id)):
            return False
        await close_outputs(bus, request_id, job.delivery.attempt)
        await leave_queues(bus, job)
        await self._stage.finish(job)
        return True

    async def _publish_first(self, job: Job, header: TaskHeader, admitted: Admitted) -> None:
        pipeline = self._context.pipelines[header.model]
        await tasks.publish_first(self._context.bus, pipeline, header, admitted.prompt)
        self._stage.counters.handled(job)
        self._context.metrics.of(header.model).counter("requests_accepted_total").add()
        self._context.log.info(
            "accepted",
            request_id=job.request_id,
            attempt=job.delivery.attempt,
            model=header.model,
            lane=header.lane,
        )

    async def _expire(self, job: Job, allowed_s: float, on_late: OnLate) -> None:
        assert job.request_id is not None
        bus, request_id = self._context.bus, job.request_id
        late, unread = f"not finished within {allowed_s:g} s of its acceptance", None
        with contextlib.suppress(Unavailable):
            unread = await why_unread(bus, request_id)
        error: PagemillError = DeadlineExceeded(late, field="timeout_s")
        if unread is not None:
            error = UnsupportedVersion(f"{late}: {unread}")
        path = [self._stage.span(job)]
        ends_in_text = on_late == "text" and await output_ends.has_ended(bus, request_id, TEXT)
        end = cut_outputs if ends_in_text else end_request
        ending = partial(end, bus, request_id, job.delivery.attempt, error, path)
        await settle(bus, request_id, ending, job.delivery)
        self._stage.counters.ended_with(error)
        await self._stage.finish(job)
        self._context.log.warning("expired", request_id=job.request_id, allowed_s=allowed_s)

    async def _cancel(self, job: Job) -> None:
        """End a cancelled request, also one that has not arrived yet.

        Raises an error for an invalid id.
        """
        bus, request_id = self._context.bus, _id_of(job)
        error = Cancelled("cancelled on request")
        self._traces.bind(job)
        has_ended = is_final(await last_record(bus, request_id))
        if not has_ended:
            _check_id(request_id)
        end = partial(end_request, bus, request_id, job.delivery.attempt, error, [])
        await settle(bus, request_id, end, job.delivery)
        if has_ended:
            await repeat_end(bus, request_id)
        self._stage.counters.ended_with(error)
        self._context.log.info("cancelled", request_id=request_id)
        await job.delivery.ack()


def _with_log(delivery: Delivery, request_id: str | None) -> str | None:
    """Return an id; None if it has no log for an answer."""
    has_log = names.has_own_log(subjects.last_token(delivery.subject), delivery.tenant)
    return request_id if has_log else None


def _id_of(job: Job) -> str:
    """Return the id of a job. Raises DecodeError without one: the job becomes a dead letter."""
    if job.request_id is None:
        raise DecodeError(ID_RULE, field="request_id")
    return job.request_id


def _check_id(request_id: str) -> None:
    """Raise InvalidRequest for an id that no request may have. Its log ends with this error."""
    if not names.is_scoped_id(request_id):
        raise InvalidRequest(ID_RULE, field="request_id")


async def why_unread(bus: Bus, request_id: str) -> str | None:
    """Return why the workers could not read a task of the request; None if each was read.

    Raises Unavailable.
    """
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    records = (decode_attempt(message.data) for message in stored)
    latest = {record.stage: record for record in records if record is not None}
    unread = [record for record in latest.values() if record.unread]
    return f"{unread[-1].stage}: {unread[-1].unread}" if unread else None
