"""The loop of all workers: it consumes queues, and calls a handler for each delivery.

A role that serves a stage is one function, `async def handle(task, tensors, job) -> Outcome`. The
loop decodes the task, claims the job, calls the function, and settles the job by what it returns or
raises. `run` returns after the drain.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
from msgspec import Struct

from shared.bus.consumer import Consumer, Delivery, Puller
from shared.codec.envelope import TensorData
from shared.errors import BlobLost
from shared.helpers.device_errors import is_device_lost
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.pipeline import TEXT
from shared.protocol.records import OutputSummary
from shared.protocol.task_messages import Task, TaskBody
from shared.stage import slot_queues, tasks
from shared.stage.job import Job
from shared.stage.runtime import Context, Shutdown
from shared.stage.slot_queues import SlotOwner
from shared.state import item_results
from shared.tenants.fair_turns import FairTurns
from shared.tenants.storage_quotas import LOG_STREAMS

MAX_LOGGED_IDS = 8
BATCH_AT_ONCE = 4
"""Limit on jobs of the batch lane that one worker claims, writes to a log or settles at one time.

The messages of all jobs wait for one event loop, so more batch jobs would delay interactive jobs.
"""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Forward:
    """Publish the stage's result to the next stages."""

    result: Struct
    tensors: Sequence[TensorData] = field(default_factory=list)
    detour: bool = False
    """Publish it to the stage of the detour, which forwards it in place of this stage."""


@dataclass(frozen=True, slots=True)
class Done:
    """The stage's output is complete, or the result of an item task is published."""

    summary: OutputSummary = OutputSummary()  # noqa: RUF009
    on_end: Callable[[], None] | None = None
    """Called when the end is in the log."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request was ended elsewhere, so nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """No request waits for the item any more, or its payload is lost."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Return the job to its queue. The attempt does not count as a failure."""

    after_s: float = 0.0


Outcome = Forward | Done | Ended | Abandoned | Requeue
HandleTask = Callable[[Task[Any], list[TensorData], Job], Awaitable[Outcome]]
HandleJob = Callable[[Job], Awaitable[None]]
HandleDelivery = Callable[[Delivery], Awaitable[None]]


class WorkerLoop:
    """The consumers of one worker, and the life of each delivery in it."""

    def __init__(self, context: Context) -> None:
        context.may_have_work = True
        self.consumers: dict[tuple[str, str], Puller] = {}
        """Consumers of the stage's queues, by model and lane."""
        self._context = context
        self._stage = context.stage
        self._serving: list[tuple[Puller, HandleDelivery]] = []
        self._running: asyncio.TaskGroup | None = None
        """Tasks that serve the consumers, until the drain is over."""
        self._background = TaskSet()
        self._batch_turns = FairTurns(BATCH_AT_ONCE, "")
        self._crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_claimed(self) -> int:
        """Deliveries that are not settled yet."""
        return sum(consumer.num_in_flight for consumer, _ in self._serving)

    async def add_stage(
        self,
        models: Iterable[str],
        capacity: int,
        body: type[TaskBody],
        handle: HandleTask,
        load: Callable[[], float] | None = None,
    ) -> None:
        """Serve this worker's stage for `models`, with a consumer for each model and lane.

        `load` returns the used share of this worker's capacity. A stage with slots needs it.
        """

        async def on_delivery(delivery: Delivery) -> None:
            job = self._stage.receive(delivery)
            if job is not None:
                await self._run(job, lambda job: self._run_task(job, body, handle))

        for model in models:
            slots = [] if load is None else await slot_queues.find_slots(self._context, model)
            if load is None or not slots:
                await self._consume(model, capacity)
            else:
                await self._consume_slots(model, slots, capacity, load)
            for lane in subjects.LANES:
                self._serving.append((self.consumers[model, lane], on_delivery))

    async def _consume(self, model: str, capacity: int) -> None:
        bus, ack_wait_s = self._context.bus, self._context.config.delivery.ack_wait_s
        for lane in subjects.LANES:
            durable = subjects.stage_consumer(self._stage.name, model, lane)
            where = subjects.stage_filter(self._stage.name, model, lane)
            self.consumers[model, lane] = await bus.queues.consume(
                subjects.STAGES_STREAM, durable, where, capacity, ack_wait_s
            )

    async def _consume_slots(
        self, model: str, slots: list[int], capacity: int, load: Callable[[], float]
    ) -> None:
        bus, ack_wait_s = self._context.bus, self._context.config.delivery.ack_wait_s
        owner = SlotOwner(self._context, model, slots)
        for lane in subjects.LANES:
            queues = slot_queues.queues_of(self._stage.name, model, lane, [None, *slots])
            consumer = await bus.queues.consume_slots(
                subjects.STAGES_STREAM, queues, capacity, ack_wait_s, load
            )
            self.consumers[model, lane] = consumer
            owner.consumers.append(consumer)
        self._background.start(owner.run())

    def add_queue(
        self, consumer: Consumer, job_of: Callable[[Delivery], Job | None], handle: HandleJob
    ) -> None:
        """Serve a queue of other messages than tasks. `handle` settles the job itself.

        `job_of` returns None for another delivery of a job that this worker has. A queue may be
        added while this worker runs.
        """

        async def on_delivery(delivery: Delivery) -> None:
            if (job := job_of(delivery)) is not None:
                await self._run(job, handle)

        self._serving.append((consumer, on_delivery))
        if self._running is not None:
            self._serve(self._running, consumer, on_delivery)

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` in the background until the drain is over."""
        self._background.start(work)

    def depend_on(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` as `start` does. If it fails, this worker ends as by `crash`."""
        self._background.start(work).add_done_callback(self._check_end)

    def _check_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)

    def crash(self, error: BaseException) -> None:
        """End `run` with `error` at once. Running jobs are delivered again after their ack wait."""
        if not self._crash.done():
            if is_device_lost(error):
                running = self._stage.claims.running
                request_ids = [job.request_id for job in running[:MAX_LOGGED_IDS]]
                self._context.log.error("device_lost", requests=request_ids, reason=str(error))
            self._crash.set_exception(error)
            self._context.shutdown.begin()
            self._context.shutdown.hurry.set()

    async def run(self) -> None:
        """Handle deliveries until a shutdown has begun and the drain is over."""
        async with asyncio.TaskGroup() as self._running:
            for consumer, handle in self._serving:
                self._serve(self._running, consumer, handle)
        self._running = None
        for task in [*self._background]:
            task.cancel()
        if self._crash.done():
            self._crash.result()

    def _serve(self, group: asyncio.TaskGroup, consumer: Puller, handle: HandleDelivery) -> None:
        drain_s = self._context.config.delivery.drain_s
        group.create_task(serve(consumer, handle, self._context.shutdown, drain_s))

    async def _run(self, job: Job, handle: HandleJob) -> None:
        try:
            await handle(job)
        except asyncio.CancelledError:
            # The running job may have caused the crash, so its attempt stays open and counts.
            if not (self._crash.done() and job.running):
                await self._stage.requeue(job)
            raise
        except Exception as error:
            await self._stage.fail(job, error)
        finally:
            await self._stage.discard_outputs(job)

    async def _run_task(self, job: Job, body: type[TaskBody], handle: HandleTask) -> None:
        stage = self._stage
        task, tensors = tasks.decode(job.delivery.data, body)
        job.identify(task.header, task.body, tensors)
        job.inputs = task.body.blobs()
        # While the job waits for its turn, it may be delivered again.
        stage.claims.add(job)
        async with self.turn(job):
            is_claimed = await self._claim(job)
        if not is_claimed:
            return
        try:
            outcome = await handle(task, tensors, job)
        except BlobLost as lost:
            await stage.rerender(job, lost)
            return
        async with self.turn(job):
            await self._settle(job, outcome)

    @asynccontextmanager
    async def turn(self, job: Job) -> AsyncIterator[None]:
        """Wait for a turn if the job is in the batch lane, where tenants take turns."""
        if job.header is None or job.header.lane != "batch":
            yield
            return
        claims = self._stage.claims
        job.waiting = True
        async with self._batch_turns.turn(job.tenant, max_held=sys.maxsize):
            job.waiting = False
            # Jobs that wait advance with this one, so other workers must not get them.
            claims.progressed(claims.waiting)
            yield

    async def _claim(self, job: Job) -> bool:
        """Claim a job and open its log. Return whether it may run; otherwise it is settled."""
        stage = self._stage
        assert job.header is not None
        if job.ticket is None and job.delivery.attempt == 1:
            await item_results.reset_failures(stage.bus, job.header.request_id)
        log = await stage.claim(job)
        if log is None:
            return False
        log.before_first = lambda: stage.start_followers(job)
        if log.output == TEXT and not log.records:
            # Many requests may have been admitted before any of them had stored a record.
            await self._context.quotas.check(job.tenant, LOG_STREAMS)
        return True

    async def _settle(self, job: Job, outcome: Outcome) -> None:
        stage = self._stage
        match outcome:
            case Forward(result, tensors, detour):
                await stage.forward(job, result, tensors, detour=detour)
            case Done() if job.ticket is None:
                await stage.finish_item(job)
            case Done(summary, on_end):
                await stage.end_output(job, summary, on_end)
            case Ended():
                await stage.yield_ownership(job)
            case Abandoned():
                await stage.close_attempt(job)
                await stage.finish(job)
            case Requeue(after_s):
                await stage.requeue(job, after_s)


async def create_queues(context: Context) -> None:
    """Create the consumers of all stages of all models.

    A queue without a consumer has no length, and the autoscaler needs the length to start workers.
    """
    ack_wait_s = context.config.delivery.ack_wait_s
    for model, pipeline in context.pipelines.items():
        for stage in pipeline.stages:
            for lane in subjects.LANES:
                queues = slot_queues.queues_of(stage.name, model, lane, stage.queue_slots)
                stream = subjects.STAGES_STREAM
                await context.bus.queues.create_slots(stream, queues, ack_wait_s)


async def serve(
    consumer: Puller, handle: HandleDelivery, shutdown: Shutdown, drain_s: float
) -> None:
    """Run `handle` for every delivery until `shutdown`, then wait for the running handlers.

    Handlers that run longer than `drain_s` are cancelled, and requeue their jobs.
    """
    running: set[asyncio.Task[None]] = set()

    async def pull() -> None:
        while True:
            task = asyncio.create_task(_run(handle, await consumer.next()))
            running.add(task)
            task.add_done_callback(running.discard)

    pulling = asyncio.create_task(pull())
    stop = asyncio.create_task(shutdown.asked.wait())
    try:
        await asyncio.wait({pulling, stop}, return_when=asyncio.FIRST_COMPLETED)
        if pulling.done():
            pulling.result()
    finally:
        pulling.cancel()
        stop.cancel()
    await consumer.stop()
    await shutdown.drained(running, drain_s)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _run(handle: HandleDelivery, delivery: Delivery) -> None:
    try:
        await handle(delivery)
    except Exception:
        _log.exception("unsettled", subject=delivery.subject, attempt=delivery.attempt)
        delivery.abandon()
