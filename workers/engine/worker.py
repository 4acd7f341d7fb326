"""Engine: reads rendered requests, and writes their token logs.

All of this runs in the asyncio loop; the model's steps run in the thread of `StepThread`.
"""

import asyncio
import base64
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shared.codec.envelope import TensorData
from shared.errors import InvalidGrammar, Overloaded
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.messages import PROMPT_TOKENS
from shared.protocol.pipeline import ANSWER
from shared.protocol.records import StageSpan
from shared.protocol.task_messages import EngineBody, Task, TaskHeader
from shared.stage.inputs import RequestEnded
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.stage import SUSPECT_PAUSE_S
from shared.stage.worker_loop import MAX_LOGGED_IDS, Done, Ended, Outcome, Requeue, WorkerLoop
from shared.state.kv_event_log import KVLogWriter
from shared.state.log_records import is_final
from shared.state.token_log import last_record
from workers.engine.code_lead import CodeLead
from workers.engine.core.engine import EngineCore
from workers.engine.core.engine_stats import EngineStats
from workers.engine.core.kv_events import encode_batches
from workers.engine.core.sequence import EngineRequest, Item, RequestOutput
from workers.engine.core.speech_pieces import has_next_piece
from workers.engine.item_loader import ItemLoader
from workers.engine.kv_transfer import KVReader
from workers.engine.metrics import EngineMetrics, RequestTiming, heartbeat_figures, pull_load
from workers.engine.open_request import NotBegun, OpenRequest, RecordPacer
from workers.engine.record_rate import RecordRate
from workers.engine.sampling.grammar import Grammar, GrammarCompiler
from workers.engine.stage_output import Progress, Rendered, StageOutput, TextOutput
from workers.engine.step_thread import StepThread

if TYPE_CHECKING:
    # Tests run engines without a tower, and without torch.
    from workers.engine.item_encoder import ItemEncoder

WATCH_S = 0.5
# Time after the deadline by which a coordinator has ended a late request.
GRACE_MS = 2000.0
# Average pause of a request while too many grammars wait for their trial.
GRAMMAR_PAUSE_S = 5.0

_Prepared = tuple[EngineRequest, Rendered]


class EngineWorker:
    """Feeds the step thread from the stage's queues and writes its outputs to the token logs."""

    def __init__(
        self,
        context: Context,
        model: str,
        core: EngineCore,
        items: ItemLoader,
        grammars: GrammarCompiler | None = None,
        kv: KVReader | None = None,
        output: StageOutput | None = None,
        lead: CodeLead | None = None,
        encoder: "ItemEncoder | None" = None,
    ) -> None:
        """Without `grammars`, requests with a grammar are refused. Without `kv`, all prompts are
        computed here. `output` is text by default. `lead` pauses speeches that are far ahead of the
        following stages. The `encoder`, if there is one, belongs to the core's runner."""
        self._context = context
        self._model = model
        self._items = items
        self._grammars = grammars
        self._kv = kv
        self._output = TextOutput() if output is None else output
        self._lead = CodeLead() if lead is None else lead
        self._preparing: set[str] = set()
        """Requests that wait for embeddings, a grammar, or the text that they speak."""
        self._ended: set[str] = set()
        """Requests of `_preparing` that were ended elsewhere."""
        self._requests: dict[str, OpenRequest] = {}
        self._num_begun = 0
        self._background = TaskSet()
        self._stage = context.stage
        self._stats = core.stats()
        self._metrics = EngineMetrics(
            context.metrics.of(model),
            self._stats,
            context.bus.connection.to_broker_ms,
            counts_requests=self._output.is_answer,
        )
        self._kv_events = core.kv_events
        self._kv_log = KVLogWriter(context.bus, context.worker)
        limits = context.config.engine
        self._max_num_seqs = limits.max_num_seqs
        self._pacer = RecordPacer(
            RecordRate(limits.max_appends_per_s),
            self._output.appends_per_s,
            self._requests.values,
        )
        self._loop = WorkerLoop(context)
        loop = asyncio.get_running_loop()
        self._encoder = encoder
        self._steps: StepThread[OpenRequest] = StepThread(
            core,
            lambda outputs, stats: loop.call_soon_threadsafe(
                self._on_step, outputs, stats, self._steps.began_s, time.monotonic()
            ),
            lambda error: loop.call_soon_threadsafe(self._loop.crash, error),
        )

    async def serve(self) -> None:
        context = self._context
        self._steps.start()
        if self._encoder is not None:
            self._encoder.on_result = self._steps.take_embedding
            self._loop.depend_on(self._encoder.thread.work())
        if self._kv_events is not None:
            self._publish_kv_events()
            self._background.start(self._kv_log.run())
        await context.bus.watch_subjects(subjects.ENDED_FILTER, self._on_ended)
        body = self._output.body
        await self._loop.add_stage(
            [self._model], self._max_num_seqs, body, self._handle, self._pull_load
        )
        context.ready([self._model], self._load)
        self._background.start(self._watch_steps())
        # A crash of the step thread ends the process. Running requests are delivered to another
        # worker after the ack wait.
        await self._loop.run()
        self._steps.stop()
        if self._encoder is not None:
            self._encoder.thread.close()

    async def _watch_steps(self) -> None:
        """End the process when a step hangs, or a batch of the tower: this engine would continue to
        claim requests."""
        while True:
            await asyncio.sleep(WATCH_S)
            batch_s = 0.0 if self._encoder is None else self._encoder.thread.batch_s
            if max(self._steps.step_s, batch_s) > self._context.config.engine.step_timeout_s:
                self._context.log.error("step_hangs", requests=[*self._requests][:MAX_LOGGED_IDS])
                # A thread cannot be stopped. Running requests are delivered to another worker.
                os._exit(1)
            if self._steps.is_idle:
                # All requests wait for their texts or items. A thread that hangs is not idle.
                self._stage.claims.progressed(o.job for o in self._requests.values())

    def _adjust_capacity(self) -> None:
        """Set the capacity of the consumers to the number of requests that this engine can run.

        While requests wait for blocks or slots, claiming more would only keep them from other
        engines. A request that waits for its embeddings occupies no place, and waiting batch
        requests do not delay interactive requests.
        """
        capacity = self._max_num_seqs + min(len(self._preparing), self._max_num_seqs)
        stats = self._stats
        num_before = {
            "interactive": stats.num_waiting - stats.num_waiting_batch,
            "batch": stats.num_waiting,
        }
        for (_, lane), consumer in self._loop.consumers.items():
            consumer.set_capacity(consumer.num_in_flight if num_before[lane] else capacity)

    def _pull_load(self) -> float:
        """Return this engine's load, which sets the priority of its pulls from slots."""
        used = self._loop.num_claimed / self._max_num_seqs
        step_tokens = self._context.config.engine.max_num_batched_tokens
        return pull_load(self._stats, used, self._num_ahead, self._num_begun, step_tokens)

    @property
    def _num_ahead(self) -> int:
        """Prompt tokens of the requests that have no step yet."""
        return sum(o.timing.num_prompt_tokens for o in self._requests.values() if not o.begun)

    def _load(self) -> dict[str, float]:
        held, opening = len(self._requests), len(self._preparing)
        figures = heartbeat_figures(self._stats)
        return {"held": held, "opening": opening, PROMPT_TOKENS: self._num_ahead, **figures}

    # -- requests in ------------------------------------------------------------------------

    async def _handle(self, task: Task[Any], tensors: list[TensorData], job: Job) -> Outcome:
        assert job.log is not None
        header, records = task.header, job.log.records
        try:
            request, rendered = await self._prepare(task, tensors, job)
        except NotBegun as stopped:
            return stopped.outcome
        if not self._stage.claims.may_begin(job):
            return Requeue(SUSPECT_PAUSE_S)
        self._num_begun += 1
        assert header.ticket is not None
        num_tokens = len(request.prompt_token_ids)
        timing = RequestTiming.of(header.ticket.accepted_ms, job.received_ms, num_tokens, records)
        self._context.log.info(
            "began",
            request_id=header.request_id,
            attempt=job.delivery.attempt,
            prompt_tokens=num_tokens,
            resumed_records=len(records),
        )
        opened = OpenRequest(job, header, timing, rendered, self._output.record_tokens)
        return await self._run(opened, request)

    async def _prepare(self, task: Task[Any], tensors: list[TensorData], job: Job) -> _Prepared:
        """Return the request with prompt, items, grammar and KV blocks. May raise BlobLost."""
        assert job.log is not None
        request_id, ticket = task.header.request_id, task.header.ticket
        assert ticket is not None

        async def progress() -> None:
            # The notice of an end may be lost, but a coordinator has ended every late request.
            is_late = self._context.bus.now_ms() > ticket.deadline_ms + GRACE_MS
            if request_id in self._ended or is_late:
                raise NotBegun(Ended())
            if self._context.shutdown.asked.is_set():
                raise NotBegun(Requeue())
            await job.delivery.progress()

        # A waiting request cannot kill the worker, so it must not delay other suspects.
        job.suspect = False
        self._preparing.add(request_id)
        self._adjust_capacity()
        try:
            began_ms = self._context.bus.now_ms()
            await self._lead.wait(
                self._context.bus, task.header, job.log.records, progress, self._is_crowded
            )
            rendered = await self._output.render(task, job.log.records, progress)
            task, header = rendered.task, rendered.task.header
            items = await self._open_items(task, tensors, progress)
            edges = self._context.pipelines[self._model].gathered_by(self._stage.name)
            if edges and any(item.embedding is not None for item in task.body.items):
                # The span belongs to the fan-out stage, and this engine gathers its results.
                times = began_ms, self._context.bus.now_ms()
                span = StageSpan(edges[0].target, "", job.delivery.attempt, *times)
                job.path = [*job.path, span]
            speech = rendered.speech and replace(rendered.speech, items=items)
            grammar = await self._compile(header, progress)
            request = EngineRequest(
                request_id=request_id,
                prompt_token_ids=task.body.prompt_token_ids,
                items=[] if speech else items,
                sampling=header.sampling,
                logged=self._output.logged(job.log.records, header.sampling.n),
                lane=header.lane,
                tenant=ticket.cache_scope,
                adapter=header.adapter,
                new_token_mask=None if grammar is None else grammar.new_mask,
                embedding=header.embedding,
                speech=speech,
            )
            if self._kv is not None and task.body.kv:
                request = replace(request, received=await self._kv.read(request, task.body.kv))
                # Reading the blocks may have taken seconds.
                await progress()
            return request, rendered
        except RequestEnded as ended:
            raise NotBegun(Ended()) from ended
        finally:
            self._preparing.discard(request_id)
            self._adjust_capacity()
            self._ended.discard(request_id)

    async def _open_items(
        self, task: Task[EngineBody], tensors: list[TensorData], progress: Progress
    ) -> list[Item]:
        pipeline, header = self._context.pipelines[self._model], task.header
        part = pipeline.part_for(header.outputs, text_given=header.text_given)
        followers = part.followers_of(self._stage.name)
        # A talker reads the items after the engine of the text.
        reads_last = all(edge.function != ANSWER for edge in followers)
        return [
            await self._items.open(item, tensors, progress, reads_last=reads_last)
            for item in task.body.items
        ]

    def _is_crowded(self) -> bool:
        return len(self._preparing) > self._max_num_seqs

    async def _compile(
        self, header: TaskHeader, progress: Callable[[], Awaitable[None]]
    ) -> Grammar | None:
        outputs = header.sampling.structured_outputs
        if outputs is None:
            return None
        if self._grammars is None:
            raise InvalidGrammar(
                "this model does not support structured outputs: it has no end token, or an"
                " unsupported tokenizer",
                field="sampling_params.structured_outputs",
            )
        assert header.ticket is not None
        try:
            tenant = header.ticket.tenant
            return await self._grammars.compile(outputs, tenant, progress, header.lane)
        except Overloaded as full:
            # The pause leaves room in this worker for requests of other tenants.
            raise NotBegun(Requeue(GRAMMAR_PAUSE_S * (0.5 + random.random()))) from full

    async def _run(self, opened: OpenRequest, request: EngineRequest) -> Outcome:
        """Run a request in the step thread, and write its log to the end."""
        request_id = request.request_id
        self._requests[request_id] = opened
        opened.job.running = True
        self._steps.add(request, opened)
        opened.start_reading(self._steps.extend_speech)
        try:
            return await self._write(opened)
        finally:
            opened.stop_reading()
            # The request must not take another step after its job is settled.
            if self._requests.get(request_id) is opened:
                del self._requests[request_id]
                self._steps.cancel(request_id)

    # -- outputs ----------------------------------------------------------------------------

    def _on_step(
        self,
        outputs: list[tuple[OpenRequest, RequestOutput]],
        stats: EngineStats,
        began_s: float,
        ended_s: float,
    ) -> None:
        self._stats, requests = stats, self._requests
        first = (requests[name].timing for name in stats.first_scheduled if name in requests)
        timed = ((opened.timing, output) for opened, output in outputs)
        self._metrics.on_step(first, timed, stats, began_s, ended_s)
        self._publish_kv_events()
        for opened, output in outputs:
            # In the batch lane, a separate record of first tokens would delay interactive requests.
            is_first = not opened.begun and opened.header.lane != "batch"
            is_awaited = self._output.is_awaited(output, opened.rendered, is_first=is_first)
            opened.push(output, awaited=is_awaited)
        self._pacer.release_in_time()
        self._adjust_capacity()
        # Not reported by a timer: the requests of a step that hangs must be delivered again.
        self._stage.claims.progressed(opened.job for opened in requests.values())

    def _publish_kv_events(self) -> None:
        if self._kv_events is not None:
            events, now_s = self._kv_events.take(), self._context.bus.now_ms() / 1000
            self._kv_log.put(encode_batches(events, now_s))

    async def _write(self, opened: OpenRequest) -> Outcome:
        """Append the outputs of the steps to the log, until one of them ends the request."""
        job, rendered = opened.job, opened.rendered
        assert job.log is not None
        if not self._output.is_answer:
            # The following stages prepare while the first frames are computed.
            await job.log.begin()
        while outputs := await opened.next_outputs():
            async with self._loop.turn(job):
                with self._pacer.writing():
                    is_appended = await self._output.append(job.log, outputs, rendered)
            if is_appended:
                # A request that makes progress did not kill its earlier workers.
                job.suspect = False
            last = outputs[-1]
            if last.embedding:
                await job.log.embedding(base64.b64encode(last.embedding).decode())
            if last.error is not None:
                raise last.error
            if last.usage is not None and not has_next_piece(last, rendered.piece):
                return Done(self._output.summary(last, rendered), lambda: self._on_finished(opened))
            # The next piece of a text has another prompt. Other requests may come before it.
            num_frames = self._output.num_frames(last, rendered)
            if last.usage is not None or await self._lead.is_too_long(
                self._context.bus, opened.header, num_frames
            ):
                return Requeue()
        return Ended()

    def _on_finished(self, opened: OpenRequest) -> None:
        now_ms = self._context.bus.now_ms()
        self._metrics.on_finished(opened.timing, now_ms)
        self._context.log.info(
            "finished",
            request_id=opened.header.request_id,
            attempt=opened.job.delivery.attempt,
            ms=round(now_ms - opened.job.received_ms, 1),
            age_ms=round(now_ms - opened.timing.accepted_ms, 1),
            prompt_tokens=opened.timing.num_prompt_tokens,
            generated_tokens=opened.timing.num_generated,
        )

    # -- ends from outside ------------------------------------------------------------------

    def _on_ended(self, subject: str) -> None:
        request_id = subjects.last_token(subject)
        if request_id in self._preparing:
            self._ended.add(request_id)
        if (opened := self._requests.get(request_id)) is not None:
            self._background.start(self._end_if_ended(opened))

    async def _end_if_ended(self, opened: OpenRequest) -> None:
        """End a request if its log confirms the notice of its end."""
        if is_final(await last_record(self._context.bus, opened.header.request_id)):
            opened.end()
