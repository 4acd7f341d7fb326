"""Prefill worker: an engine that computes prompts and writes no token.

It is on a detour of its model's pipeline: it claims a task for an engine, and forwards the task to
the engines with references to the KV blocks of the prompt. The blocks are only a cache. After any
failure, the task is forwarded unchanged.
"""

import asyncio
import os
import time
from dataclasses import dataclass

from msgspec.structs import replace

from shared.codec.envelope import TensorData
from shared.protocol import subjects
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, KVBlob, Task
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Ended, Forward, Outcome, WorkerLoop
from workers.engine import kv_transfer
from workers.engine.core.engine_stats import EngineStats
from workers.engine.core.sequence import EngineRequest, RequestOutput
from workers.engine.main import Built, build
from workers.engine.step_thread import StepThread

# Tasks in flight in each lane: while one prompt is computed, the next one is opened and the
# previous one stored.
MAX_TASKS = 4
# Longest wait for encoders. After it the engine waits instead, because later tasks may need no
# encoder.
MAX_WAIT_S = 5.0
WATCH_S = 0.5
# The token is dropped. It proves that the keys and values before it are finite.
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


async def main(context: Context) -> None:
    # The engines read the embeddings too, if they have to compute the prompt.
    await PrefillWorker(context, await build(context, reads_last=False)).serve()


@dataclass(slots=True, eq=False)
class _Prefill:
    """A prompt in the step thread."""

    job: Job
    output: "asyncio.Future[RequestOutput | None]"
    """The last output; None if the request was ended elsewhere."""

    def settle(self, output: RequestOutput | None) -> None:
        if not self.output.done():
            self.output.set_result(output)

    def give_up(self) -> None:
        if not self.output.done():
            self.output.set_exception(RuntimeError("a step takes longer than delivery.ack_wait_s"))


class PrefillWorker:
    """Computes prompts in a step thread, and forwards their tasks to the engines."""

    def __init__(self, context: Context, engine: Built) -> None:
        self._context = context
        self._engine = engine
        self._jobs: set[Job] = set()
        self._running: dict[str, _Prefill] = {}
        self._num_prefilled = 0
        self._stats = engine.core.stats()
        self._loop = WorkerLoop(context)
        loop = asyncio.get_running_loop()
        self._steps: StepThread[_Prefill] = StepThread(
            engine.core,
            lambda outputs, stats: loop.call_soon_threadsafe(self._on_step, outputs, stats),
            lambda error: loop.call_soon_threadsafe(self._loop.crash, error),
        )

    async def serve(self) -> None:
        context, model = self._context, self._engine.model
        self._steps.start()
        await context.bus.watch_subjects(subjects.ENDED_FILTER, self._on_ended)
        await self._loop.add_stage([model], MAX_TASKS, EngineBody, self._handle)
        context.ready([model], self._load)
        watching = asyncio.create_task(self._watch_steps())
        await self._loop.run()
        watching.cancel()
        self._steps.stop()

    async def _watch_steps(self) -> None:
        """Forward the prompts of a step that takes too long, and end the process if it hangs.

        The engines compute these prompts. A worker that hangs would continue to claim tasks.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if self._steps.step_s > self._context.config.engine.step_timeout_s:
                self._context.log.error("step_hangs", requests=[*self._running])
                # A thread cannot be stopped. The tasks are delivered to another worker.
                os._exit(1)
            if self._is_stuck:
                for prefill in self._running.values():
                    prefill.give_up()

    @property
    def _is_stuck(self) -> bool:
        """Whether the step takes longer than `ack_wait_s`. Its tasks are then delivered again."""
        return self._steps.step_s > self._context.config.delivery.ack_wait_s

    def _load(self) -> dict[str, float]:
        now_ms = self._context.bus.now_ms()
        ages_ms = (now_ms - job.delivery.stored_ms for job in self._jobs)
        return {
            "held": len(self._jobs),
            "oldest_s": max(ages_ms, default=0.0) / 1000,
            # In both states, renderers must not send detours to this worker.
            "draining": float(self._context.shutdown.asked.is_set() or self._is_stuck),
            "prefilled": self._num_prefilled,
            "free_blocks": self._stats.num_free_blocks,
            "blocks": self._stats.num_blocks,
            "prefix_query_tokens": self._stats.prefix_query_tokens,
            "prefix_hit_tokens": self._stats.prefix_hit_tokens,
        }

    async def _handle(self, task: Task[EngineBody], tensors: list[TensorData], job: Job) -> Outcome:
        unchanged = Forward(task.body, tensors)
        if job.delivery.attempt > 1:
            # An earlier worker has died, perhaps because of this task, or has forwarded it already.
            return unchanged
        self._jobs.add(job)
        try:
            kv = await self._prefill(task, tensors, job)
        except Exception:
            self._context.log.warning(
                "not_prefilled", request_id=task.header.request_id, exc_info=True
            )
            # The engine gets no references to the stored blocks, so it would not release them.
            await self._context.stage.discard_outputs(job)
            return unchanged
        finally:
            self._jobs.discard(job)
        if kv is None:
            return Ended()
        return Forward(replace(task.body, kv=kv), tensors)

    async def _prefill(
        self, task: Task[EngineBody], tensors: list[TensorData], job: Job
    ) -> list[KVBlob] | None:
        """Compute a prompt and store its blocks; None if the request was ended elsewhere."""
        header, ticket = task.header, task.header.ticket
        assert ticket is not None
        assert self._engine.layout is not None

        began_s = time.monotonic()

        async def progress() -> None:
            if self._context.shutdown.asked.is_set():
                raise RuntimeError("the worker drains")
            if time.monotonic() > began_s + MAX_WAIT_S:
                raise RuntimeError("the embeddings of an image are late")
            await job.delivery.progress()

        items = [await self._engine.items.open(item, tensors, progress) for item in task.body.items]
        output = await self._run(
            EngineRequest(
                header.request_id,
                task.body.prompt_token_ids,
                items,
                ONE_TOKEN,
                lane=header.lane,
                tenant=ticket.cache_scope,
                adapter=header.adapter,
                export_run_bytes=kv_transfer.RUN_BYTES,
            ),
            job,
        )
        if output is None:
            return None
        if output.error is not None:
            # The engine will fail with the same error, and report it.
            raise output.error
        ttl_s = (ticket.deadline_ms - self._context.bus.now_ms()) / 1000
        kv = await kv_transfer.store(
            self._engine.blobs,
            self._engine.layout,
            header.adapter,
            output.kv,
            max(0.0, ttl_s),
            job.outputs,
        )
        self._num_prefilled += bool(kv)
        self._context.log.info(
            "prefilled",
            request_id=header.request_id,
            blocks=sum(blocks.num_blocks for blocks in kv),
            bytes=sum(blocks.ref.num_bytes for blocks in kv),
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )
        return kv

    async def _run(self, request: EngineRequest, job: Job) -> RequestOutput | None:
        request_id = request.request_id
        prefill = _Prefill(job, asyncio.get_running_loop().create_future())
        if self._is_stuck:
            prefill.give_up()
        self._running[request_id] = prefill
        job.running = True
        self._steps.add(request, prefill)
        try:
            return await prefill.output
        finally:
            del self._running[request_id]
            self._steps.cancel(request_id)

    def _on_step(self, outputs: list[tuple[_Prefill, RequestOutput]], stats: EngineStats) -> None:
        self._stats = stats
        for prefill, output in outputs:
            if output.usage is not None or output.error is not None:
                prefill.settle(output)
        # Not reported by a timer: the tasks of a step that hangs must be delivered again.
        self._context.stage.claims.progressed(prefill.job for prefill in self._running.values())

    def _on_ended(self, subject: str) -> None:
        self._context.stage.claims.note_ended(subject)
        if (prefill := self._running.get(subjects.last_token(subject))) is not None:
            prefill.settle(None)
