"""Bugs of the engine: its heartbeat, its blocks, its batches and its tasks."""

import asyncio
from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, wrap


@bug("engine", "hangs", "I1", "I10", "I11")
def heartbeat_by_timer() -> None:
    """A timer reports progress, even while no step ends."""
    from workers.engine.worker import EngineWorker

    @wrap(EngineWorker, "serve")
    async def with_timer(serve: Any, self: EngineWorker) -> None:
        async def beat() -> None:
            while True:
                await asyncio.sleep(0.2)
                for opened in list(self._requests.values()):
                    await opened.job.delivery.progress()

        beating = asyncio.create_task(beat())
        try:
            await serve(self)
        finally:
            beating.cancel()


@bug("engine", "cancels", "I6")
def block_lost_on_cancel() -> None:
    from workers.engine.core.engine import EngineCore

    @wrap(EngineCore, "cancel")
    def leaky(cancel: Any, self: EngineCore, request_id: str) -> None:
        state = self._requests.get(request_id)
        for choice in state.choices if state else []:
            if choice.sequence.block_table:
                choice.sequence.block_table.pop()
        cancel(self, request_id)


@bug("engine", "many raisers", "I10")
def batch_fails_together() -> None:
    from shared.errors import WorkerFailure
    from workers.engine.core.engine import EngineCore
    from workers.engine.core.sequence import Batch, RequestOutput

    def fail_all(self: EngineCore, batch: Batch, error: Exception) -> list[RequestOutput]:
        failure = WorkerFailure("the batch failed")
        return [self._fail(state, failure) for state in self._requests_of(batch.scheduled)]

    replace_attribute(EngineCore, "_bisect_batch", fail_all)


@bug("engine", "calm", "I8")
def task_left_behind() -> None:
    from shared.stage.job import Job
    from shared.stage.stage import Stage

    left: list[asyncio.Task[None]] = []

    @wrap(Stage, "claim")
    async def littering(claim: Any, self: Stage, job: Job) -> Any:
        left.append(asyncio.create_task(asyncio.sleep(3600)))
        return await claim(self, job)
