"""Engine: rendered requests in, token log out.

Everything here runs in the asyncio loop; the steps themselves run in `StepThread`'s thread.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from shared.bus.consumer import Consumer, Delivery
from shared.codec import envelope
from shared.errors import BlobLost, InvalidGrammar
from shared.protocol import subjects
from shared.protocol.messages import EngineTask, StageSpan
from shared.stage.loop import serve
from shared.stage.runtime import Context
from shared.stage.stage import SUSPECT_PAUSE_S, Job
from shared.state.kv_event_log import KVLogWriter
from shared.state.token_log import LogWriter, is_final, last_record
from workers.engine.core.engine import EngineCore, EngineStats
from workers.engine.core.kv_events import encode_batches
from workers.engine.core.sequence import EngineRequest, Item, RequestOutput
from workers.engine.item_loader import ItemLoader
from workers.engine.log_records import logged_choices, merge_deltas, num_for_record
from workers.engine.metrics import EngineMetrics, RequestTiming
from workers.engine.sampling.grammar import Grammar, GrammarCompiler
from workers.engine.step_thread import StepThread

# A text that grows so often is seen to flow. An append is a synced write, and work for four
# processes.
MAX_APPENDS_OF_REQUEST_PER_S = 25
# How long an append that is under way may take when its request is to be given up.
LAST_APPEND_S = 1.0
WATCH_S = 0.5
MAX_TOLD = 8
# By then a coordinator has ended a request that is late.
GRACE_MS = 2000.0


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request in hand: from its delivery to the last record of its log."""

    job: Job
    task: EngineTask
    log: LogWriter
    timing: RequestTiming
    pending: list[RequestOutput] = field(default_factory=list)
    """Outputs that are not in the log yet."""
    begun: bool = False
    """Something of it is in the log, or on its way there."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: bool = False
    """No further record is to be written."""
    settled: bool = False
    """The writer has come to the end, and settles the job itself."""
    writer: asyncio.Task[None] | None = None


class EngineWorker:
    """Feeds the step loop from the stage's queues and writes its outputs to the token logs."""

    def __init__(
        self,
        context: Context,
        model: str,
        core: EngineCore,
        opener: ItemLoader,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Without `grammars`, requests that have one are refused."""
        self._context = context
        self._stage = context.stage
        self._model = model
        self._opener = opener
        self._grammars = grammars
        self._opening: set[str] = set()
        """Requests that wait for what encoders make."""
        self._ended: set[str] = set()
        """Of these, the ones that have ended meanwhile."""
        self._flows: dict[str, OpenRequest] = {}
        self._consumers: list[Consumer] = []
        self._told: set[asyncio.Task[None]] = set()
        self._stats = core.stats()
        self._meters = EngineMetrics(
            context.metrics.of(model), self._stats, context.bus.to_broker_ms
        )
        self._kv_events = core.kv_events
        self._kv_log = KVLogWriter(context.bus, context.worker)
        self._max_num_seqs = context.config.engine.max_num_seqs
        self._appends_per_s = context.config.engine.max_appends_per_s
        self._released_s = 0.0
        """When the outputs of all requests went on their way to the logs."""
        self._release_timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._crash: asyncio.Future[None] = loop.create_future()
        self._steps: StepThread[OpenRequest] = StepThread(
            core,
            lambda outputs, stats: loop.call_soon_threadsafe(
                self._on_step, outputs, stats, self._steps.began_s, time.monotonic()
            ),
            lambda error: loop.call_soon_threadsafe(self._crash.set_exception, error),
        )

    async def serve(self) -> None:
        context, delivery = self._context, self._context.config.delivery
        self._steps.start()
        if self._kv_events is not None:
            self._tell_kv_events()
            self._start(self._kv_log.run())
        await context.bus.watch_subjects(subjects.ENDED_FILTER, self._on_ended)
        for lane in subjects.LANES:
            self._consumers.append(
                await context.bus.consume(
                    subjects.STAGES_STREAM,
                    subjects.stage_consumer(context.role, self._model, lane),
                    subjects.stage_filter(context.role, self._model, lane),
                    self._max_num_seqs,
                    delivery.ack_wait_s,
                )
            )
        context.ready([self._model], self._load)
        # A crash of the step loop ends the process: what is in hand comes to another worker after
        # the ack wait.
        self._crash.add_done_callback(lambda _: context.shutdown.asked.set())
        self._start(self._watch_steps())
        await asyncio.gather(
            *(serve(consumer, self._handle, context.shutdown, 0.0) for consumer in self._consumers)
        )
        if self._crash.done():
            self._crash.result()
        await self._drain(delivery.drain_s)
        self._steps.stop()

    async def _watch_steps(self) -> None:
        """A step that never ends would keep this engine taking work that it never does."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._steps.step_s > self._context.config.engine.step_timeout_s:
                self._context.log.error("step_hangs", requests=list(self._flows)[:MAX_TOLD])
                # Nothing stops a thread. What is in hand comes to another worker.
                os._exit(1)

    def _ask_for_work(self) -> None:
        """As much as there is room for. While requests wait for blocks or slots, taking more would
        only keep them from others; what waits for its embeddings keeps nobody out, and what waits
        in the slower lane nobody of the faster."""
        capacity = self._max_num_seqs + min(len(self._opening), self._max_num_seqs)
        stats = self._stats
        num_before = {
            "interactive": stats.num_waiting - stats.num_waiting_batch,
            "batch": stats.num_waiting,
        }
        for lane, consumer in zip(subjects.LANES, self._consumers, strict=False):
            consumer.set_capacity(consumer.num_in_flight if num_before[lane] else capacity)

    def _load(self) -> dict[str, float]:
        stats = self._stats
        return {
            "held": len(self._flows),
            "opening": len(self._opening),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "free_blocks": stats.num_free_blocks,
            "blocks": stats.num_blocks,
            "prefix_query_tokens": stats.prefix_query_tokens,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "prefix_evictions": stats.prefix_evictions,
            "preemptions": stats.num_preemptions,
            "kv_waste": round(stats.kv_waste, 4),
            "encoded_items": stats.encoded_items,
        }

    async def _drain(self, drain_s: float) -> None:
        """Finish what is in hand; what is not done in time goes back, to be resumed elsewhere."""
        writers = {flow.writer for flow in self._flows.values() if flow.writer is not None}
        await self._context.shutdown.drained(writers, drain_s)
        await asyncio.gather(*(self._hand_back(flow) for flow in list(self._flows.values())))

    async def _hand_back(self, flow: OpenRequest) -> None:
        if await self._stop(flow):
            with contextlib.suppress(Exception):
                # Without a broker there is nobody to give it to: it comes again after its ack wait.
                await self._stage.requeue(flow.job)

    # -- in ---------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        job = self._stage.receive(delivery)
        if job is None:
            return
        try:
            await self._begin(job)
        except asyncio.CancelledError:
            await self._stage.requeue(job)
            raise
        except Exception as error:
            await self._stage.fail(job, error)

    async def _begin(self, job: Job) -> None:
        task, _ = envelope.decode(job.delivery.data, EngineTask)
        job.identify(task)
        job.inputs = [item.blob for item in task.items if item.blob is not None]
        log = await self._stage.claim(job)
        if log is None:
            return
        try:
            opened = await self._wait_for(job, task)
        except BlobLost as lost:
            await self._stage.rerender(job, task, lost)
            return
        if opened is None:
            await self._stage.yield_ownership(job)
            return
        items, grammar = opened
        if not self._stage.may_begin(job):
            await self._stage.requeue(job, SUSPECT_PAUSE_S)
            return
        request = EngineRequest(
            request_id=task.request_id,
            prompt_token_ids=task.prompt_token_ids,
            items=items,
            sampling=task.sampling_params,
            logged=logged_choices(log.records, task.sampling_params.n),
            lane=task.lane,
            tenant=task.accepted.cache_scope,
            adapter=task.adapter,
            new_token_mask=None if grammar is None else grammar.new_mask,
        )
        flow = OpenRequest(
            job, task, log, RequestTiming.from_task(task, job.received_ms, log.records)
        )
        self._flows[task.request_id] = flow
        flow.writer = asyncio.create_task(self._write(flow))
        self._steps.add(request, flow)
        self._context.log.info(
            "began",
            request_id=task.request_id,
            attempt=job.delivery.attempt,
            prompt_tokens=len(task.prompt_token_ids),
            resumed_records=len(log.records),
        )

    async def _wait_for(
        self, job: Job, task: EngineTask
    ) -> tuple[list[Item], Grammar | None] | None:
        """The request's items, as soon as encoders have made what they make of them, and its
        grammar, if it has one; None if it has ended before."""
        _, tensors = envelope.decode(job.delivery.data, EngineTask)

        async def progress() -> None:
            if task.request_id in self._ended or self._is_late(task):
                raise _Ended
            await job.delivery.progress()

        # What waits kills nobody: it is not to keep other suspects from their turn.
        job.suspect = False
        self._opening.add(task.request_id)
        self._ask_for_work()
        try:
            asked_ms = self._context.bus.now_ms()
            items = [await self._opener.open(item, tensors, progress) for item in task.items]
            if any(item.embedding is not None for item in task.items):
                there_ms = self._context.bus.now_ms()
                encoded = StageSpan("encoder", "", job.delivery.attempt, asked_ms, there_ms)
                job.path = [*job.path, encoded]
            return items, await self._compile(task, progress)
        except _Ended:
            return None
        finally:
            self._opening.discard(task.request_id)
            self._ask_for_work()
            self._ended.discard(task.request_id)

    async def _compile(
        self, task: EngineTask, progress: Callable[[], Awaitable[None]]
    ) -> Grammar | None:
        wanted = task.sampling_params.structured_outputs
        if wanted is None:
            return None
        if self._grammars is None:
            raise InvalidGrammar(
                "answers of this model cannot be held to a grammar",
                field="sampling_params.structured_outputs",
            )
        return await self._grammars.compile(wanted, progress)

    def _is_late(self, task: EngineTask) -> bool:
        """The coordinator ends it at its deadline, and tells; nobody need rely on the telling."""
        return self._context.bus.now_ms() > task.accepted.deadline_ms + GRACE_MS

    # -- out --------------------------------------------------------------------------------

    def _on_step(
        self,
        outputs: list[tuple[OpenRequest, RequestOutput]],
        stats: EngineStats,
        began_s: float,
        ended_s: float,
    ) -> None:
        self._stats = stats
        begun = (self._flows[name].timing for name in stats.first_scheduled if name in self._flows)
        timed = ((flow.timing, output) for flow, output in outputs)
        self._meters.on_step(begun, timed, stats, began_s, ended_s)
        self._tell_kv_events()
        for flow, output in outputs:
            flow.pending.append(output)
            # A first token and an end are not kept waiting.
            if not flow.begun or output.usage is not None or output.error is not None:
                flow.begun = True
                flow.changed.set()
        self._release_in_time()
        self._ask_for_work()
        # Never by a timer: a step that hangs tells nothing, and loses its requests.
        self._stage.progressed(flow.job for flow in self._flows.values())

    def _release_in_time(self) -> None:
        """Let outputs go to the logs no more often than they can take it, all at one time: the more
        requests there are, the more tokens of each share a record."""
        loop = asyncio.get_running_loop()
        period_s = max(len(self._flows) / self._appends_per_s, 1 / MAX_APPENDS_OF_REQUEST_PER_S)
        wait_s = self._released_s + period_s - loop.time()
        if wait_s <= 0:
            self._release()
        elif self._release_timer is None:
            self._release_timer = loop.call_later(wait_s, self._release)

    def _release(self) -> None:
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        self._released_s = asyncio.get_running_loop().time()
        for flow in self._flows.values():
            if flow.pending:
                flow.changed.set()

    def _tell_kv_events(self) -> None:
        if self._kv_events is not None:
            now_s = self._context.bus.now_ms() / 1000
            self._kv_log.put(encode_batches(self._kv_events.take(), now_s))

    async def _write(self, flow: OpenRequest) -> None:
        try:
            while not await self._write_pending(flow):
                if flow.stopped:
                    return
            flow.settled = True
            await self._stage.finish(flow.job)
            self._context.log.info(
                "finished",
                request_id=flow.task.request_id,
                attempt=flow.job.delivery.attempt,
                ms=round(self._context.bus.now_ms() - flow.job.received_ms, 1),
            )
        except Exception as error:
            # Before anything else: it takes no further step.
            self._drop(flow)
            flow.settled = True
            await self._stage.fail(flow.job, error)
        finally:
            self._drop(flow)

    async def _write_pending(self, flow: OpenRequest) -> bool:
        """Append what the steps have put out meanwhile; returns whether that ends the request."""
        await flow.changed.wait()
        flow.changed.clear()
        num_outputs = num_for_record(flow.pending)
        outputs, flow.pending = flow.pending[:num_outputs], flow.pending[num_outputs:]
        if flow.stopped or not outputs:
            return False
        if flow.pending:
            flow.changed.set()
        choices = merge_deltas(outputs)
        if choices:
            await flow.log.tokens(choices, outputs[0].prompt_logprobs)
            # Whatever killed the workers before us, it is not this request.
            flow.job.suspect = False
        last = outputs[-1]
        if last.error is not None:
            raise last.error
        if last.usage is None:
            return False
        hop = self._stage.span(flow.job)
        await flow.log.finish(last.usage, last.kv_blocks, [*flow.job.path, hop])
        self._meters.on_finished(flow.timing, self._context.bus.now_ms())
        return True

    # -- ends from outside ------------------------------------------------------------------

    def _on_ended(self, subject: str) -> None:
        request_id = subjects.last_token(subject)
        if request_id in self._opening:
            self._ended.add(request_id)
        flow = self._flows.get(request_id)
        if flow is not None:
            self._start(self._let_go(flow))

    async def _let_go(self, flow: OpenRequest) -> None:
        """Somebody says that the request has ended: a hint, which only its log can confirm."""
        record = await last_record(self._context.bus, flow.task.request_id)
        if record is not None and is_final(record) and await self._stop(flow):
            await self._stage.finish(flow.job)

    async def _stop(self, flow: OpenRequest) -> bool:
        """No more steps for it, and no more records; an append under way may come to its end.

        Returns whether the job is left to be settled, and by the caller.
        """
        self._drop(flow)
        if flow.stopped or flow.settled:
            return False
        flow.stopped = True
        flow.changed.set()
        if flow.writer is not None:
            await asyncio.wait([flow.writer], timeout=LAST_APPEND_S)
            flow.writer.cancel()
        return not flow.settled

    def _drop(self, flow: OpenRequest) -> None:
        """Forget the request here and in the step loop; does nothing the second time."""
        if self._flows.get(flow.task.request_id) is flow:
            del self._flows[flow.task.request_id]
            self._steps.cancel(flow.task.request_id)

    def _start(self, work: Any) -> None:
        """Run `work` beside; the loop alone would not keep it alive."""
        task = asyncio.create_task(work)
        self._told.add(task)
        task.add_done_callback(self._told.discard)


class _Ended(Exception):
    """Of a request that has ended before it has begun."""
