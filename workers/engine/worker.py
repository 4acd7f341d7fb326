"""Engine: rendered requests in, token log out. The step loop runs in a thread of its own.

Between asyncio and the step loop there are two queues of plain objects: requests and cancellations
go in, the outputs of each step come out. Neither side ever waits for the other.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shared import codec, subjects, tensors
from shared.config import EngineConfig, ModelConfig
from shared.consumer import Consumer, Delivery
from shared.errors import ConfigError, DecodeError, PagemillError
from shared.messages import ChoiceDelta, EngineTask, LogRecord, TokenChunk
from shared.runtime import Context
from shared.stage import now_ms
from shared.tokenlog import LogWriter
from workers.engine.blocks import BlockPool
from workers.engine.core import Core, Stats
from workers.engine.loader import load
from workers.engine.runner import Runner
from workers.engine.sequence import EngineRequest, Item, LoggedChoice, RequestOutput


async def main(context: Context) -> None:
    config, name = context.config, context.model
    if name is None:
        raise ConfigError("an engine serves one model: name it with --model", field="model")
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    core = await asyncio.to_thread(build_core, config.models[name], config.engine)
    await EngineWorker(context, name, core).serve()


def build_core(model: ModelConfig, engine: EngineConfig) -> Core:
    """Load a model and everything around it; raises ConfigError when it cannot be served."""
    loaded = load(model, engine)
    return Core(
        Runner(loaded.model, loaded.num_blocks, loaded.block_size),
        loaded.decode,
        loaded.eos_token_ids,
        pool=BlockPool(loaded.num_blocks, loaded.block_size),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
    )


@dataclass(slots=True, eq=False)
class Flow:
    """A request in hand: from its delivery to the last record of its log."""

    delivery: Delivery
    task: EngineTask
    log: LogWriter
    received_ms: float
    last_progress_s: float
    pending: list[RequestOutput] = field(default_factory=list)
    """Outputs that are not in the log yet; several steps go into one record if the log is slow."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.Task[None] | None = None
    progress: asyncio.Task[None] | None = None


class EngineWorker:
    """Feeds the step loop from the stage's queues and writes its outputs to the token logs."""

    def __init__(self, context: Context, model: str, core: Core) -> None:
        self._context = context
        self._model = model
        self._flows: dict[str, Flow] = {}
        self._consumers: list[Consumer] = []
        self._stats = core.stats()
        self._max_num_seqs = context.config.engine.max_num_seqs
        # Progress is told a few times within the ack wait, and only by a step that has ended.
        self._progress_s = context.config.delivery.ack_wait_s / 3
        loop = asyncio.get_running_loop()
        self._crash: asyncio.Future[None] = loop.create_future()
        self._steps = StepLoop(
            core,
            lambda outputs, stats: loop.call_soon_threadsafe(self._on_step, outputs, stats),
            lambda error: loop.call_soon_threadsafe(self._crash.set_exception, error),
        )

    async def serve(self) -> None:
        context, delivery = self._context, self._context.config.delivery
        self._steps.start()
        for lane in subjects.LANES:
            self._consumers.append(
                await context.bus.consume(
                    subjects.STAGES_STREAM,
                    subjects.stage_consumer(context.role, self._model, lane),
                    subjects.stage(context.role, self._model, lane),
                    self._max_num_seqs,
                    delivery.ack_wait_s,
                )
            )
        context.ready([self._model], self._load)
        takers = [asyncio.create_task(self._take(consumer)) for consumer in self._consumers]
        # A crash of the step loop ends the process: what is in hand comes to another worker after
        # the ack wait.
        self._crash.add_done_callback(lambda _: context.stopping.set())
        await context.stopping.wait()
        if self._crash.done():
            self._crash.result()
        for taker in takers:
            taker.cancel()
        for consumer in self._consumers:
            await consumer.stop()
        await self._drain(delivery.drain_s)
        self._steps.stop()

    def _load(self) -> dict[str, float]:
        stats = self._stats
        return {
            "held": len(self._flows),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "free_blocks": stats.num_free_blocks,
            "blocks": stats.num_blocks,
        }

    async def _drain(self, drain_s: float) -> None:
        """Finish what is in hand; what is not done in time goes back, to be resumed elsewhere."""
        writers = [flow.writer for flow in self._flows.values() if flow.writer is not None]
        if writers:
            await asyncio.wait(writers, timeout=drain_s)
        for flow in list(self._flows.values()):
            await self._stop(flow)
            await flow.delivery.retry(0)

    # -- in ---------------------------------------------------------------------------------

    async def _take(self, consumer: Consumer) -> None:
        while True:
            delivery = await consumer.next()
            received_ms = now_ms()
            task: EngineTask | None = None
            try:
                # Before anything that the message could make fail: it must come to an end.
                if (exhausted := self._context.stage.exhausted(delivery)) is not None:
                    raise exhausted
                task, data = codec.decode(delivery.data, EngineTask)
                await self._begin(delivery, task, data, received_ms)
            except asyncio.CancelledError:
                await delivery.retry(0)
                raise
            except Exception as error:
                await self._fail(delivery, task, error, received_ms)

    async def _begin(
        self,
        delivery: Delivery,
        task: EngineTask,
        data: list[codec.TensorData],
        received_ms: float,
    ) -> None:
        held = self._flows.get(task.request_id)
        if held is not None:
            # It came back to the very worker that holds it: the newer delivery takes its place.
            await self._stop(held)
            held.delivery.abandon()
        log = await LogWriter.open(self._context.bus, task.request_id, delivery.attempt)
        if log.closed:
            await delivery.ack()
            return
        request = EngineRequest(
            request_id=task.request_id,
            prompt_token_ids=task.prompt_token_ids,
            items=_items(task, data),
            sampling=task.sampling_params,
            logged=logged_choices(log.records, task.sampling_params.n),
        )
        now = asyncio.get_running_loop().time()
        flow = Flow(delivery, task, log, received_ms, now)
        self._flows[task.request_id] = flow
        flow.writer = asyncio.create_task(self._write(flow))
        self._steps.add(request, flow)
        self._context.log.info(
            "began",
            request_id=task.request_id,
            attempt=delivery.attempt,
            prompt_tokens=len(task.prompt_token_ids),
            resumed_records=len(log.records),
        )

    # -- out --------------------------------------------------------------------------------

    def _on_step(self, outputs: list[tuple[Flow, RequestOutput]], stats: Stats) -> None:
        self._stats = stats
        for flow, output in outputs:
            flow.pending.append(output)
            flow.changed.set()
        # While requests wait for blocks or slots, taking more would only keep them from others.
        for consumer in self._consumers:
            consumer.set_capacity(consumer.held if stats.num_waiting else self._max_num_seqs)
        now = asyncio.get_running_loop().time()
        for flow in self._flows.values():
            if now - flow.last_progress_s > self._progress_s:
                flow.last_progress_s = now
                flow.progress = asyncio.create_task(_tell_progress(flow.delivery))

    async def _write(self, flow: Flow) -> None:
        try:
            while not await self._write_pending(flow):
                pass
            await flow.delivery.ack()
            self._context.log.info(
                "finished",
                request_id=flow.task.request_id,
                attempt=flow.delivery.attempt,
                ms=round(now_ms() - flow.received_ms, 1),
            )
        except Exception as error:
            await self._fail(flow.delivery, flow.task, error, flow.received_ms)
        finally:
            self._drop(flow)

    async def _write_pending(self, flow: Flow) -> bool:
        """Append what the steps have put out meanwhile; returns whether that ends the request."""
        await flow.changed.wait()
        flow.changed.clear()
        outputs, flow.pending = flow.pending, []
        choices = merge_deltas(outputs)
        if choices:
            await flow.log.tokens(choices)
        last = outputs[-1]
        if last.error is not None:
            raise last.error
        if last.usage is None:
            return False
        hop = self._context.stage.hop(flow.delivery, flow.received_ms)
        await flow.log.finish(last.usage, last.kv_blocks, [*flow.task.path, hop])
        return True

    async def _fail(
        self, delivery: Delivery, task: EngineTask | None, error: Exception, received_ms: float
    ) -> None:
        stage = self._context.stage
        request_id = task.request_id if task else stage.request_id_of(delivery)
        path = [*(task.path if task else []), stage.hop(delivery, received_ms)]
        try:
            await stage.settle_failure(delivery, request_id, error, path)
        except Exception:
            # The broker is away; the message comes again after its ack wait.
            self._context.log.exception("unsettled", request_id=request_id)
            delivery.abandon()

    async def _stop(self, flow: Flow) -> None:
        if flow.writer is not None:
            flow.writer.cancel()
            await asyncio.wait([flow.writer])
        self._drop(flow)

    def _drop(self, flow: Flow) -> None:
        """Forget the request here and in the step loop; does nothing the second time."""
        if self._flows.get(flow.task.request_id) is flow:
            del self._flows[flow.task.request_id]
            self._steps.cancel(flow.task.request_id)


class StepLoop:
    """The thread that owns the core: nobody else touches it after the start.

    Every output goes to the flow that its request came with. The name of the request would not do:
    outputs of an earlier flow of that name may still be on their way when a later one begins.
    """

    def __init__(
        self,
        core: Core,
        on_step: Callable[[list[tuple[Flow, RequestOutput]], Stats], object],
        on_crash: Callable[[Exception], object],
    ) -> None:
        self._core = core
        self._on_step = on_step
        self._on_crash = on_crash
        self._flows: dict[str, Flow] = {}
        self._commands: queue.SimpleQueue[tuple[EngineRequest, Flow] | str | None]
        self._commands = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest, flow: Flow) -> None:
        self._commands.put((request, flow))

    def cancel(self, request_id: str) -> None:
        self._commands.put(request_id)

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:
            self._on_crash(error)

    def _step_until_stopped(self) -> None:
        while True:
            told: list[tuple[Flow, RequestOutput]] = []
            # An idle loop sleeps on the queue; a busy one looks into it between steps.
            while not self._commands.empty() or not (self._core.has_work or told):
                command = self._commands.get()
                if command is None:
                    return
                if isinstance(command, str):
                    self._core.cancel(command)
                    self._flows.pop(command, None)
                else:
                    told += self._add(*command)
            told += [(self._flows[output.request_id], output) for output in self._core.step()]
            self._on_step(told, self._core.stats())

    def _add(self, request: EngineRequest, flow: Flow) -> list[tuple[Flow, RequestOutput]]:
        """What there is to tell at once: that the core refuses it."""
        try:
            self._core.add(request)
        except PagemillError as error:
            return [(flow, RequestOutput(request.request_id, [], error=error))]
        self._flows[request.request_id] = flow
        return []


async def _tell_progress(delivery: Delivery) -> None:
    # Without a connection there is nobody to tell; the delivery then comes again.
    with contextlib.suppress(Exception):
        await delivery.progress()


def merge_deltas(outputs: list[RequestOutput]) -> list[ChoiceDelta]:
    """Consecutive deltas of each choice as one."""
    merged: dict[int, ChoiceDelta] = {}
    for delta in (choice for output in outputs for choice in output.choices):
        first = merged.get(delta.index)
        if first is None:
            merged[delta.index] = delta
            continue
        merged[delta.index] = ChoiceDelta(
            index=delta.index,
            position=first.position,
            token_ids=first.token_ids + delta.token_ids,
            text=first.text + delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
    return [merged[index] for index in sorted(merged)]


def logged_choices(records: list[LogRecord], n: int) -> list[LoggedChoice]:
    """What a log holds of each choice; nothing for an empty log."""
    if not records:
        return []
    token_ids: list[list[int]] = [[] for _ in range(n)]
    finished = [False] * n
    for record in records:
        if isinstance(record, TokenChunk):
            for delta in record.choices:
                token_ids[delta.index] += delta.token_ids
                finished[delta.index] |= delta.finish_reason is not None
    return [LoggedChoice(ids, done) for ids, done in zip(token_ids, finished, strict=True)]


def _items(task: EngineTask, data: list[codec.TensorData]) -> list[Item]:
    indexes = [i for item in task.items for i in item.fields.values()]
    if any(not 0 <= i < len(data) for i in indexes):
        raise DecodeError("an item names a tensor that its envelope does not have")
    return [
        Item(
            modality=item.modality,
            mm_hash=item.mm_hash,
            placeholder=item.placeholder,
            fields={name: tensors.to_torch(data[i]) for name, i in item.fields.items()},
        )
        for item in task.items
    ]
