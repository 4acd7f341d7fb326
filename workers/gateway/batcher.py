"""Batcher: runs the lines of batches by calling the gateway's endpoints inside its process.

It is a second entry point of this package, a gateway without a listener, so that a line has every
limit, error and answer that the same request has over HTTP. A batch stays in its queue until it has
ended, and its log alone decides how it continues, so a batcher may be killed at any moment.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from shared.bus.connection import BROKER_DEADLINE_S
from shared.bus.consumer import Delivery
from shared.errors import DecodeError, Fenced, Overloaded, PagemillError, Unavailable
from shared.protocol import names, subjects
from shared.protocol.batch_log import BatchEnded, BatchJob, EndStatus, LineError, decode_batch_job
from shared.protocol.encoding import UNDECODABLE
from shared.protocol.messages import Heartbeat
from shared.protocol.pipeline import TEXT
from shared.stage.job import Job
from shared.stage.long_jobs import LongJobs
from shared.stage.runtime import Context
from shared.stage.worker_loop import WorkerLoop
from shared.state.batch_log import BatchLog, open_batch
from workers.gateway.app import build_application
from workers.gateway.batches.calls import BatchApp
from workers.gateway.batches.run import NO_ROOM, BatchRun, LineState
from workers.gateway.batches.slots import LineSlots, num_slots
from workers.gateway.openapi.document import KINDS, TABLES

LIMITS_S = 2.0
"""Interval at which the numbers of lines in flight follow the numbers of engines."""
LOOK_S = 0.2


async def main(context: Context) -> None:
    await Batcher(context).serve()


class Batcher:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._stage = context.stage
        self._jobs = LongJobs(context, context.config.batch.max_deaths)
        app = BatchApp(context.bus, context.config, context.metrics, context.worker, KINDS)
        app.lane = "batch"
        self._app = app
        routes = [route for table in TABLES for route in table.routes(app)]
        self._endpoints = build_application(app, routes)
        self._slots = LineSlots(context.config.delivery.tenant_weights)
        self._runs: dict[str, BatchRun] = {}

    async def serve(self) -> None:
        context, loop = self._context, WorkerLoop(self._context)
        await self._app.room.find_error()  # Before the first line begins.
        consumer = await context.bus.queues.consume(
            subjects.BATCHJOBS_STREAM,
            subjects.BATCHJOBS_CONSUMER,
            subjects.BATCHJOBS_FILTER,
            context.config.batch.concurrency,
            self._jobs.ack_wait_s,
        )
        loop.add_queue(consumer, self._batch_of, self._handle)
        loop.start(self._follow_engines())
        self._register_metrics()
        models = sorted(context.config.models)
        context.ready(models, lambda: {"held": float(loop.num_claimed)})
        try:
            await loop.run()
        finally:
            await self._app.close()

    def _register_metrics(self) -> None:
        metrics = self._context.metrics
        for state in get_args(LineState):
            lines = self._sum(partial(_num_lines, state=state))
            metrics.set_function("batch_lines_unfinished", lines, state=state)
        for error in NO_ROOM:
            paused = self._sum(partial(_is_paused, reason=error.code))
            metrics.set_function("batches_paused", paused, reason=error.code)
        metrics.set_function("batches_late", self._sum(lambda run: run.is_late))
        # The first end of a batch is an increase only if the series exists before.
        for status in get_args(EndStatus):
            metrics.counter("batches_ended_total", status=status)

    def _sum(self, read: Callable[[BatchRun], int]) -> Callable[[], int]:
        """Return a function that adds up a number of all batches in progress."""
        return lambda: sum(map(read, self._runs.values()))

    def _batch_of(self, delivery: Delivery) -> Job | None:
        task = _task_of(delivery)
        job_id = None if task is None else names.job_id("batch", task.batch_id, task.tenant)
        job = Job(delivery, self._context.bus.now_ms(), job_id, end=self._end)
        return self._stage.receive_job(job)

    async def _handle(self, job: Job) -> None:
        task = _task_of(job.delivery)
        if task is None:
            raise DecodeError("the message does not name a batch", field="batch_id")
        self._stage.claims.add(job)
        progress = asyncio.create_task(self._jobs.keep(job))
        try:
            log = await self._open(task)
            if log is None or log.state.ended is not None:
                await self._stage.finish(job)
                return
            now = log.state.checkpoint
            if not await self._jobs.may_begin(job, now.num_answered + now.num_refused):
                return
            has_ended = await self._run(log)
        finally:
            progress.cancel()
        await (self._stage.finish(job) if has_ended else self._stage.requeue(job))

    async def _open(self, task: BatchJob) -> BatchLog | None:
        """Return the log of a batch. A gateway may still be storing its order."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * BROKER_DEADLINE_S):
                while True:
                    log = await open_batch(self._context.bus, task.tenant, task.batch_id)
                    if log is not None:
                        return log
                    await asyncio.sleep(LOOK_S)
        return None

    async def _run(self, log: BatchLog) -> bool:
        run = BatchRun(self._context, self._app, self._endpoints, self._slots, log)
        begun = log.state.begun
        job_id = names.job_id("batch", begun.batch_id, begun.tenant)
        self._runs[job_id] = run
        try:
            return await run.carry_out()
        finally:
            del self._runs[job_id]

    async def _follow_engines(self) -> None:
        """Set the number of lines in flight of each model by its live engines. Never returns."""
        while True:
            with contextlib.suppress(Unavailable):
                beats = await self._context.bus.heartbeats.read()
                for model, pipeline in self._context.pipelines.items():
                    writer = pipeline.outputs.get(TEXT)
                    num_engines = sum(
                        writer is not None
                        and (beat.stage or beat.role) == writer.name
                        and model in beat.models
                        for beat in beats
                    )
                    self._slots.set_limit(model, self._num_slots(num_engines, beats))
            await asyncio.sleep(LIMITS_S)

    def _num_slots(self, num_engines: int, beats: Sequence[Heartbeat]) -> int:
        num_sequences = num_engines * self._context.config.engine.max_num_seqs
        num_elsewhere = sum(
            beat.load.get("held", 0.0)
            for beat in beats
            if beat.role == self._context.role and beat.worker != self._context.worker
        )
        return num_slots(num_sequences, len(self._runs), num_elsewhere)

    async def _end(self, job: Job, error: PagemillError) -> None:
        """End a batch with an error, unless it has ended or its log cannot be written."""
        task = _task_of(job.delivery)
        if task is None:
            return
        with contextlib.suppress(Fenced, Overloaded):
            log = await open_batch(self._context.bus, task.tenant, task.batch_id)
            if log is not None and log.state.ended is None:
                at_s = int(self._context.bus.now_ms() / 1000)
                errors = [LineError(error.code, error.message)]
                end = BatchEnded(log.next_index, at_s, "failed", log.state.checkpoint, errors)
                await log.append(end)
                self._context.metrics.counter("batches_ended_total", status=end.status).add()


def _task_of(delivery: Delivery) -> BatchJob | None:
    """Return None for a message that does not name a batch."""
    try:
        task = decode_batch_job(delivery.data)
    except UNDECODABLE:
        return None
    return task if names.is_job_id(names.job_id("batch", task.batch_id, task.tenant)) else None


def _num_lines(run: BatchRun, state: LineState) -> int:
    return run.lines_by_state()[state]


def _is_paused(run: BatchRun, reason: str) -> bool:
    return run.pause == reason
