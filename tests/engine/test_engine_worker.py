"""A whole engine worker, whose steps are let go one by one: which lane goes first when it is full,
and how many tokens share a record."""

import asyncio
import itertools
import secrets
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from shared.blobs.store import Blobs
from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.client import follow
from shared.codec import envelope
from shared.config.schema import BlobsConfig, Config, EngineConfig, ModelConfig
from shared.errors import GrammarNotTried, Overloaded, PagemillError, WorkerFailure
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.messages import decode_attempt
from shared.protocol.multimodal import BlobRef
from shared.protocol.records import Failure, TokenChunk
from shared.protocol.sampling import StructuredOutputs
from shared.protocol.task_messages import KVBlob, RequestTicket
from shared.stage.runtime import Context
from shared.state import dead_letters
from shared.state.token_log import LogWriter, end_request
from tests.accepted import consume_requests, next_request
from tests.engine.core.test_kv_events import put_task
from tests.fakes import FakeRunner
from tests.tasks import engine_task
from workers.engine import worker as engine_worker
from workers.engine.code_lead import CodeLead
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import Batch, EngineRequest, ReceivedKV, SampledToken
from workers.engine.item_loader import ItemLoader
from workers.engine.worker import EngineWorker
from workers.gateway.http.errors import status_of


class StepwiseRunner(FakeRunner):
    """Each step lasts until it is let go."""

    def __init__(self) -> None:
        super().__init__(block_size=2, vocab_size=50)
        self.go_on = threading.Semaphore(0)
        self.served: dict[str, None] = {}
        """Requests in the order in which they have begun."""

    def run(self, batch: Batch) -> list[list[SampledToken]]:
        self.go_on.acquire()
        self.served |= dict.fromkeys(s.sequence.request_id for s in batch.scheduled)
        return super().run(batch)


async def start_worker(
    bus: Bus, model: str, engine: EngineConfig, slots: int = 1
) -> tuple[EngineWorker, StepwiseRunner, Context]:
    name = f"engine-{secrets.token_hex(4)}"
    config = Config({model: ModelConfig("nowhere", slots=slots)}, engine=engine)
    context = Context("engine", name, model, config, bus, structlog.get_logger())
    runner = StepwiseRunner()
    core = EngineCore(
        runner,
        lambda token_ids, **_: "x" * len(token_ids),
        frozenset(),
        pool=BlockPool(256, 2),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=512,
        vocab_size=50,
    )
    opener = ItemLoader(
        Blobs(bus, "engine", name, BlobsConfig(arena_mib=1)), None, lambda data: data
    )
    worker = EngineWorker(context, model, core, opener)
    await bus.add_responder("pm.test.receipt", lambda receipt: b"+OK")
    return worker, runner, context


async def step(worker: EngineWorker, runner: StepwiseRunner) -> None:
    """Returns when the worker has seen what came of it."""
    num_steps = worker._stats.num_steps
    runner.go_on.release()
    while worker._stats.num_steps == num_steps:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_tokens_are_gathered_into_records(bus: Bus) -> None:
    """The first goes at once, and so does the last; those between wait until a record may go."""
    model, num_tokens = "gathered", 40
    worker, runner, context = await start_worker(bus, model, EngineConfig(max_appends_per_s=1))
    serving = asyncio.create_task(worker.serve())
    request_id = f"gathered-{secrets.token_hex(8)}"
    await put_task(bus, model, request_id, [1] * 8, max_tokens=num_tokens)

    async def step_by_step() -> None:
        """No step before the last one's tokens are in the log, or wait to be gathered."""
        for _ in range(num_tokens):
            await step(worker, runner)
            opened = worker._requests.get(request_id)
            while opened and opened.pending and worker._pacer._timer is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async with asyncio.timeout(20):
        stepping = asyncio.create_task(step_by_step())
        records = [record async for record in follow(bus, request_id)]
        await stepping
    chunks = [record.choices[0] for record in records if isinstance(record, TokenChunk)]
    context.shutdown.asked.set()
    await serving
    await context.close()
    assert len(chunks[0].token_ids) == 1
    assert [chunk.position for chunk in chunks] == list(
        itertools.accumulate((len(chunk.token_ids) for chunk in chunks[:-1]), initial=0)
    )
    assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens
    # Forty steps take a fraction of the second between two records.
    assert len(chunks) < num_tokens / 4


async def test_a_first_token_does_not_wait_for_what_others_gather(bus: Bus) -> None:
    model = "first"
    worker, runner, context = await start_worker(bus, model, EngineConfig())
    worker._pacer._appends_per_s = 0.001  # nothing is released before the end of this test
    serving = asyncio.create_task(worker.serve())
    early, late = (f"first-{secrets.token_hex(8)}" for _ in range(2))
    async with asyncio.timeout(20):
        await put_task(bus, model, early, [1] * 8, max_tokens=40)
        while not worker._requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for _ in range(3):
            await step(worker, runner)
        await put_task(bus, model, late, [2] * 8, max_tokens=40)
        while late not in worker._requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        # The step that is under way may be without it.
        for _ in range(2):
            await step(worker, runner)
        first = await anext(follow(bus, late))
        assert isinstance(first, TokenChunk)
        assert len(first.choices[0].token_ids) == 1
        assert len(worker._requests[early].pending) == 4, "the others' go on being gathered"
        runner.go_on.release(1000)
        for request_id in (early, late):
            _ = [record async for record in follow(bus, request_id)]
    context.shutdown.asked.set()
    await serving
    await context.close()


async def test_there_is_one_timer_for_what_is_gathered(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, request_id = "timer", f"timer-{secrets.token_hex(8)}"
    worker, runner, context = await start_worker(bus, model, EngineConfig())
    worker._pacer._appends_per_s = 0.001
    armed: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def watched(delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        timer = call_later(delay_s, callback, *args)
        if callback == worker._pacer._release:
            armed.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", watched)
    serving = asyncio.create_task(worker.serve())
    async with asyncio.timeout(20):
        await put_task(bus, model, request_id, [1] * 8, max_tokens=40)
        while not worker._requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for _ in range(3):
            await step(worker, runner)
        assert len(armed) == 1
        # More may be written from now on, and this is released by a step before its timer.
        worker._pacer._appends_per_s = 1e6
        worker._pacer._released_s = 0.0
        await step(worker, runner)
        assert [timer.cancelled() for timer in armed] == [True]
        runner.go_on.release(1000)
        _ = [record async for record in follow(bus, request_id)]
    context.shutdown.asked.set()
    await serving
    await context.close()


async def test_where_no_grammars_are_known_nothing_pretends_to_follow_one(bus: Bus) -> None:
    worker, _, context = await start_worker(bus, "plain", EngineConfig())
    serving = asyncio.create_task(worker.serve())
    request_id = f"plain-{secrets.token_hex(8)}"
    wanted = StructuredOutputs(json_object=True)
    await put_task(bus, "plain", request_id, [1] * 8, structured_outputs=wanted)
    async with asyncio.timeout(20):
        (record,) = [record async for record in follow(bus, request_id)]
    context.shutdown.asked.set()
    await serving
    await context.close()
    assert isinstance(record, Failure)
    assert (record.error.code, record.error.field) == (
        "invalid_grammar",
        "sampling_params.structured_outputs",
    )


async def test_a_drain_requeues_a_request_that_waits_for_its_grammar(bus: Bus) -> None:
    model = f"grammar-{secrets.token_hex(4)}"
    worker, _, context = await start_worker(bus, model, EngineConfig())
    waiting = asyncio.Event()

    class SlowCompiler:
        async def compile(
            self, _: StructuredOutputs, tenant: str, progress: Callable[[], Any], lane: str
        ) -> None:
            while True:
                await progress()
                waiting.set()
                await asyncio.sleep(0.01)

    worker._grammars = SlowCompiler()  # type: ignore[assignment]
    serving = asyncio.create_task(worker.serve())
    outputs = StructuredOutputs(json_object=True)
    await put_task(bus, model, f"r-{model}", [1, 2], structured_outputs=outputs)
    await asyncio.wait_for(waiting.wait(), 10)
    context.shutdown.signal()
    # Long before the drain would be over.
    await asyncio.wait_for(serving, 10)
    await context.close()
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(f"r-{model}"))
    attempts = [decode_attempt(message.data) for message in stored]
    assert [attempt and attempt.outcome for attempt in attempts] == ["open", "requeued"]


class FailingCompiler:
    """Every compilation ends with one error."""

    def __init__(self, error: PagemillError) -> None:
        self.error = error
        self.num_calls = 0

    async def compile(self, *_: object) -> None:
        self.num_calls += 1
        raise self.error


async def test_a_request_for_whose_grammar_there_is_no_place_goes_back_to_its_queue(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_worker, "GRAMMAR_PAUSE_S", 0.1)
    model = f"full-{secrets.token_hex(4)}"
    worker, _, context = await start_worker(bus, model, EngineConfig())
    worker._grammars = FailingCompiler(Overloaded("full"))  # type: ignore[assignment]
    serving = asyncio.create_task(worker.serve())
    outputs = StructuredOutputs(json_object=True)
    await put_task(bus, model, f"r-{model}", [1, 2], structured_outputs=outputs)
    num_stored = 0
    async with asyncio.timeout(20):
        while num_stored < 4:
            await asyncio.sleep(0.01)
            stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(f"r-{model}"))
            num_stored = len(stored)
    attempts = [decode_attempt(message.data) for message in stored]
    assert [attempt and attempt.outcome for attempt in attempts[:4]] == ["open", "requeued"] * 2
    context.shutdown.asked.set()
    await serving
    await context.close()


async def test_a_grammar_that_is_not_tried_is_a_fault_that_only_the_client_retries(
    bus: Bus,
) -> None:
    model = f"untried-{secrets.token_hex(4)}"
    worker, _, context = await start_worker(bus, model, EngineConfig())
    worker._grammars = compiler = FailingCompiler(GrammarNotTried("busy"))  # type: ignore[assignment]
    serving = asyncio.create_task(worker.serve())
    outputs = StructuredOutputs(json_object=True)
    await put_task(bus, model, f"r-{model}", [1, 2], structured_outputs=outputs)
    async with asyncio.timeout(20):
        (record,) = [record async for record in follow(bus, f"r-{model}")]
    context.shutdown.asked.set()
    await serving
    await context.close()
    assert isinstance(record, Failure)
    error = record.error
    assert (error.code, error.fault, error.retryable) == ("grammar_not_tried", "server", True)
    assert (status_of(error), error.retry_after_s, compiler.num_calls) == (503, 5.0, 1)


async def test_speeches_that_wait_leave_room_for_one_that_others_wait_for(bus: Bus) -> None:
    """Else the stages behind, full of such speeches, wait for this engine and it for them."""
    model = "ahead"
    worker, runner, context = await start_worker(bus, model, EngineConfig(max_num_seqs=1))
    worker._lead = CodeLead({"audio": ChunkSpec(max_ahead=1)})
    runner.go_on.release(1000)
    serving = asyncio.create_task(worker.serve())
    *ahead, needed = (f"ahead-{secrets.token_hex(8)}" for _ in range(4))
    for request_id in ahead:
        log = await LogWriter.open(bus, request_id, 1)
        await log.codes(0, [[1], [2]])
        await put_task(bus, model, request_id, [1], outputs=["text", "audio"])
    async with asyncio.timeout(20):
        while len(worker._preparing) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await put_task(bus, model, needed, [1])
        _ = [record async for record in follow(bus, needed)]
    context.shutdown.asked.set()
    await serving
    await context.close()


async def test_the_faster_lane_is_taken_while_the_slower_waits(bus: Bus) -> None:
    model = "lanes"
    worker, runner, context = await start_worker(bus, model, EngineConfig(max_num_seqs=2))
    serving = asyncio.create_task(worker.serve())
    running, waiting, *late = (f"lanes-{secrets.token_hex(8)}" for _ in range(4))

    async def step_until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                assert waiting not in runner.served
                runner.go_on.release()
                await asyncio.sleep(0.01)

    await put_task(bus, model, running, [1] * 200, max_tokens=300)
    await step_until(lambda: running in runner.served)
    # For this one there is a slot, but not blocks enough.
    await put_task(bus, model, waiting, [2] * 400)
    await step_until(lambda: worker._stats.num_waiting_batch == 1)
    interactive, batch = worker._loop.consumers.values()
    assert (interactive.capacity, batch.capacity) == (2, batch.num_in_flight)
    for request_id in late:
        await put_task(bus, model, request_id, [3], lane="interactive", max_tokens=2)
    await step_until(lambda: runner.served.keys() >= set(late))
    runner.go_on.release(1000)
    for request_id in (running, waiting):
        _ = [record async for record in follow(bus, request_id)]
    context.shutdown.asked.set()
    await serving
    await context.close()
    assert [*runner.served][-1] == waiting


async def test_a_task_that_cannot_be_read_is_over_at_once(bus: Bus) -> None:
    """Its request does not stay in flight until its deadline."""
    model, request_id = "unreadable", f"unreadable-{secrets.token_hex(8)}"
    requests = await consume_requests(bus)
    await bus.publish(subjects.request(model), b"what the client wrote", request_id)
    accepted = await next_request(requests, model)
    worker, _, context = await start_worker(bus, model, EngineConfig())
    serving = asyncio.create_task(worker.serve())
    await bus.publish(
        subjects.stage("engine", model, "interactive", request_id),
        b"garbage",
        subjects.stage_msg_id("engine", request_id, accepted.sequence, 0),
    )
    async with asyncio.timeout(20):
        (record,) = [record async for record in follow(bus, request_id)]
        # What is waited for happens at the broker.
        while await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert isinstance(record, Failure)
    assert record.error.code == "undecodable_message"
    assert await request_queue.queued_request(bus, accepted.sequence) is None
    assert (await dead_letters.find(bus, request_id)).request == b"what the client wrote"
    assert all(consumer.num_in_flight == 0 for consumer in worker._loop.consumers.values())
    context.shutdown.asked.set()
    await serving
    await context.close()
    await requests.stop()


async def test_a_request_that_ends_while_its_blocks_are_read_is_not_begun(bus: Bus) -> None:
    model, name = f"m-{secrets.token_hex(4)}", f"r-{secrets.token_hex(6)}"
    worker, _, context = await start_worker(bus, model, EngineConfig())
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def read(request: EngineRequest, kv: list[KVBlob]) -> ReceivedKV:
        reading.set()
        await go_on.wait()
        return ReceivedKV([])

    worker._kv = SimpleNamespace(read=read)  # type: ignore[assignment]
    now_ms = bus.now_ms()
    ticket = RequestTicket(now_ms, now_ms + 60_000, 1, "pm.test.receipt")
    task = engine_task(name, [1] * 8, model=model, lane="interactive", ticket=ticket)
    kv = [KVBlob(BlobRef("prefill-1", bytes(32), 1), "", 0, 1, b"")]
    task = replace(task, body=replace(task.body, kv=kv))
    subject = subjects.stage("engine", model, "interactive", name)
    await bus.publish(subject, envelope.encode(task, []), name)
    serving = asyncio.create_task(worker.serve())
    async with asyncio.timeout(20):
        await reading.wait()
        await end_request(bus, name, 1, WorkerFailure("it was ended"), [])
        await bus.notify(subjects.ended(name))
        while name not in worker._ended:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        go_on.set()
        while worker._loop.num_claimed:
            assert not worker._requests
            await asyncio.sleep(0)
    assert worker._stats.num_steps == 0
    context.shutdown.asked.set()
    await serving
    await context.close()
