"""Base class of generators: requests share one thread that computes their units."""

import asyncio
import os
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

from shared.codec.envelope import TensorData
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.task_messages import Task, TaskBody
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Outcome, WorkerLoop
from shared.state.log_records import is_final
from shared.state.token_log import last_record
from workers.generator.unit_thread import UnitThread

WATCH_S = 0.5


class GeneratorWorker(ABC):
    """Serves one stage; a subclass handles its tasks."""

    body: ClassVar[type[TaskBody]]
    max_claimed: ClassVar[int | None] = None
    """Limit on tasks in flight of each lane; None for `generator.max_tasks`."""

    def __init__(self, context: Context, model: str, units: UnitThread[Any, Any]) -> None:
        self._context = context
        self._model = model
        self._units = units
        self._in_flight: dict[str, Job] = {}
        self._background = TaskSet()

    async def serve(self) -> None:
        context = self._context
        loop = WorkerLoop(context)
        metrics, units = context.metrics.of(self._model), self._units
        units.on_batch = metrics.histogram("generator_batch_size").observe
        metrics.set_function("generator_waiting_units", lambda: units.num_waiting)
        for action in units.memory_shortages:
            metrics.set_function(
                "batch_memory_shortages_total",
                partial(units.memory_shortages.__getitem__, action),
                action=action,
            )
        self._register_metrics()
        await context.bus.watch_subjects(subjects.ENDED_FILTER, self._on_ended)
        capacity = self.max_claimed or context.config.generator.max_tasks
        await loop.add_stage([self._model], capacity, self.body, self._run)
        context.ready([self._model], lambda: self._load(loop))
        loop.depend_on(units.work())
        loop.depend_on(self._watch())
        try:
            await loop.run()
        finally:
            for task in self._background:
                task.cancel()
            units.close()

    def _register_metrics(self) -> None:  # noqa: B027 - not every stage has some
        """Register the metrics of this kind of output."""

    async def _run(self, task: Task[Any], tensors: list[TensorData], job: Job) -> Outcome:
        request_id = task.header.request_id
        self._in_flight[request_id], job.running = job, True
        try:
            return await self._handle(task, tensors, job)
        finally:
            del self._in_flight[request_id]

    @abstractmethod
    async def _handle(self, task: Task[Any], tensors: list[TensorData], job: Job) -> Outcome:
        """Write the stage's output for one request, or publish the result of an item task."""

    def _load(self, loop: WorkerLoop) -> dict[str, float]:
        return {"held": loop.num_claimed, "waiting": self._units.num_waiting}

    async def _watch(self) -> None:
        """Report progress, and end the process when a batch hangs.

        Progress is reported for requests that wait for frames of another stage, too. Their wait is
        limited by the deadline.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            self._context.stage.claims.progressed(self._in_flight.values())
            if self._units.batch_s > self._context.config.generator.step_timeout_s:
                self._context.log.error("batch_hangs")
                # A thread cannot be stopped. The claimed tasks are delivered to another generator.
                os._exit(1)

    def _on_ended(self, subject: str) -> None:
        request_id = subjects.last_token(subject)
        if request_id in self._in_flight:
            self._background.start(self._cancel_if_ended(request_id))

    async def _cancel_if_ended(self, request_id: str) -> None:
        """Cancel the units of a request if its log confirms the notice of its end."""
        if is_final(await last_record(self._context.bus, request_id)):
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        self._units.cancel(request_id)
