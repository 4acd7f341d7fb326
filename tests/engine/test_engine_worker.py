"""A whole engine worker with steps that a test releases one by one.

When it is full, the interactive lane comes first. Tokens share records.
"""

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.client import follow
from shared.codec import envelope
from shared.config.schema import EngineConfig
from shared.errors import GrammarNotTried, Overloaded, PagemillError, WorkerFailure
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.messages import decode_attempt
from shared.protocol.multimodal import BlobRef
from shared.protocol.records import Failure, Finish, TokenChunk
from shared.protocol.sampling import StructuredOutputs
from shared.protocol.task_messages import KVBlob, RequestTicket
from shared.stage.worker_loop import BATCH_AT_ONCE
from shared.state import dead_letters
from shared.state.token_log import LogWriter, end_request
from tests.accepted import consume_requests, next_request
from tests.support.engine import serving_engine
from tests.support.waiting import until
from tests.tasks import engine_task
from workers.engine import worker as engine_worker
from workers.engine.code_lead import CodeLead
from workers.engine.core.sequence import EngineRequest, ReceivedKV, RequestOutput
from workers.engine.open_request import RecordPacer
from workers.engine.record_rate import MIN_RATE
from workers.engine.stage_output import Rendered, TextOutput
from workers.gateway.http.errors import status_of

JSON = StructuredOutputs(json_object=True)
# Nothing that is gathered is released before the end of a test.
GATHERS = EngineConfig(max_appends_per_s=0.001)  # type: ignore[arg-type]


async def test_tokens_are_gathered_into_records(bus: Bus) -> None:
    """The first and the last are written at once; the others wait until a record may be written."""
    num_tokens, request_id = 40, f"gathered-{secrets.token_hex(8)}"
    async with serving_engine(bus, "gathered", EngineConfig(max_appends_per_s=1)) as rig:
        await rig.put(request_id, [1] * 8, lane="interactive", max_tokens=num_tokens)

        async def step_by_step() -> None:
            """No step before the last one's tokens are in the log, or wait to be gathered."""
            for _ in range(num_tokens):
                await rig.step()
                while rig.num_gathered(request_id) and rig.pacer._timer is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        async with asyncio.timeout(20):
            stepping = asyncio.create_task(step_by_step())
            records = [record async for record in follow(bus, request_id)]
            await stepping
    chunks = [record.choices[0] for record in records if isinstance(record, TokenChunk)]
    assert len(chunks[0].token_ids) == 1
    assert [chunk.position for chunk in chunks] == list(
        itertools.accumulate((len(chunk.token_ids) for chunk in chunks[:-1]), initial=0)
    )
    assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens
    # Forty steps take a fraction of the second between two records.
    assert len(chunks) < num_tokens / 4
    assert rig.pacer._rate.per_s > MIN_RATE, "the appends were measured"


async def test_a_first_token_does_not_wait_for_what_others_gather(bus: Bus) -> None:
    early, late = (f"first-{secrets.token_hex(8)}" for _ in range(2))
    async with serving_engine(bus, "first", GATHERS) as rig, asyncio.timeout(20):
        await rig.put(early, [1] * 8, lane="interactive", max_tokens=40)
        await rig.until_held()
        for _ in range(3):
            await rig.step()
        await rig.put(late, [2] * 8, lane="interactive", max_tokens=40)
        await rig.until_held(2)
        # The step that is under way may be without it.
        for _ in range(2):
            await rig.step()
        first = await anext(follow(bus, late))
        assert isinstance(first, TokenChunk)
        assert len(first.choices[0].token_ids) == 1
        assert rig.num_gathered(early) == 4, "tokens of the others are still gathered"
        rig.runner.go_on.release(1000)
        for request_id in (early, late):
            _ = [record async for record in follow(bus, request_id)]


class RareOutput(TextOutput):
    """Output with a record of each request in hours."""

    appends_per_s = 0.0001


async def test_first_tokens_of_the_batch_lane_are_gathered(bus: Bus) -> None:
    early, late = (f"gathered-{secrets.token_hex(8)}" for _ in range(2))
    rigged = serving_engine(bus, "batch-first", GATHERS, output=RareOutput())
    async with rigged as rig, asyncio.timeout(20):
        # The first record of an engine is not delayed.
        await rig.put(early, [1] * 8, max_tokens=40)
        await rig.until_held()
        await rig.step()
        await rig.put(late, [2] * 8, max_tokens=4)
        await rig.until_held(2)
        # The step that is under way may be without it.
        for _ in range(2):
            await rig.step()
        assert rig.num_gathered(late) in (1, 2)
        rig.runner.go_on.release(1000)
        chunk, finish = [record async for record in follow(bus, late)]
        assert isinstance(chunk, TokenChunk)
        assert isinstance(finish, Finish)
        assert len(chunk.choices[0].token_ids) == 4


class SlowOutput(TextOutput):
    """Output whose appends to logs of the batch lane do not end before `go_on`."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.go_on = asyncio.Event()

    async def append(
        self, log: LogWriter, outputs: list[RequestOutput], rendered: Rendered
    ) -> bool:
        if outputs[0].request_id.startswith("batch"):
            self.num_begun += 1
            await self.go_on.wait()
        return await super().append(log, outputs, rendered)


async def test_an_interactive_answer_does_not_wait_for_records_of_the_batch_lane(bus: Bus) -> None:
    output, request_id = SlowOutput(), f"fast-{secrets.token_hex(8)}"
    async with asyncio.timeout(20), serving_engine(bus, "records", output=output) as rig:
        rig.runner.go_on.release(1000)
        for number in range(2 * BATCH_AT_ONCE):
            await rig.put(f"batch-{number}-{request_id}", [1] * 8, max_tokens=1)
        await until(lambda: output.num_begun >= BATCH_AT_ONCE)
        await rig.put(request_id, [1] * 8, lane="interactive", max_tokens=1)
        _ = [record async for record in follow(bus, request_id)]
        assert output.num_begun == BATCH_AT_ONCE
        output.go_on.set()


@dataclass
class Gathered:
    """A request that always has outputs, and the times of its records."""

    lane: str
    clock: Callable[[], float]
    next_release_s: float = 0.0
    pending: tuple[str, ...] = ("a token",)
    times_s: list[float] = field(default_factory=list)

    @property
    def header(self) -> SimpleNamespace:
        return SimpleNamespace(lane=self.lane)

    def release(self) -> None:
        self.times_s.append(self.clock())


def pacer_of(requests: list[Gathered], appends_per_s: float, each_per_s: float) -> RecordPacer:
    opened: Any = requests
    rate: Any = SimpleNamespace(per_s=appends_per_s)
    return RecordPacer(rate, each_per_s, lambda: opened)


async def test_there_is_one_timer_for_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def watched(*args: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", watched)
    first, second = Gathered("interactive", loop.time), Gathered("batch", loop.time)
    requests = [first]
    # Decades between two records, and no limit without interactive requests.
    pacer = pacer_of(requests, 1e-9, math.inf)
    for _ in range(3):
        pacer.release_in_time()
    assert [timer.cancelled() for timer in timers] == [False]
    assert not first.times_s
    # A step may release them before their timer.
    requests[:] = [second]
    pacer.release_in_time()
    assert [timer.cancelled() for timer in timers] == [True]
    assert len(second.times_s) == 1


@pytest.mark.parametrize("num_batch", [0, 32, 60, 600])
async def test_batch_requests_do_not_make_streams_coarser(
    monkeypatch: pytest.MonkeyPatch, num_batch: int
) -> None:
    """All together keep the limit, and a batch request has at most one record a second."""
    now_s = 1000.0
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    monkeypatch.setattr(loop, "call_later", lambda *_: Mock())
    users = [Gathered("interactive", lambda: now_s) for _ in range(4)]
    lines = [Gathered("batch", lambda: now_s) for _ in range(num_batch)]
    pacer = pacer_of(users + lines, appends_per_s=200, each_per_s=25)
    num_steps, step_s = 12_000, 0.001
    for _ in range(num_steps):
        pacer.release_in_time()
        now_s += step_s
    total_s = num_steps * step_s
    assert all(len(user.times_s) >= 24 * total_s for user in users)
    num_records = sum(len(request.times_s) for request in users + lines)
    assert num_records <= 200 * total_s + len(lines) + len(users)
    gaps_s = [later - earlier for each in lines for earlier, later in pairwise(each.times_s)]
    assert min(gaps_s, default=1.0) >= max(1.0, num_batch / 100) - step_s
    assert max(gaps_s, default=1.0) <= max(1.0, num_batch / 100) + 0.05


async def test_without_grammars_requests_with_one_are_refused(bus: Bus) -> None:
    request_id = f"plain-{secrets.token_hex(8)}"
    async with serving_engine(bus, "plain") as rig, asyncio.timeout(20):
        await rig.put(request_id, [1] * 8, structured_outputs=JSON)
        (record,) = [record async for record in follow(bus, request_id)]
    assert isinstance(record, Failure)
    assert (record.error.code, record.error.field) == (
        "invalid_grammar",
        "sampling_params.structured_outputs",
    )


async def outcomes_of(bus: Bus, request_id: str) -> list[object]:
    """Return the outcomes of the attempts at a request."""
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    attempts = [decode_attempt(message.data) for message in stored]
    return [attempt and attempt.outcome for attempt in attempts]


async def test_a_drain_requeues_a_request_that_waits_for_its_grammar(bus: Bus) -> None:
    model = f"grammar-{secrets.token_hex(4)}"
    waiting = asyncio.Event()

    class SlowCompiler:
        async def compile(
            self, _: StructuredOutputs, tenant: str, progress: Callable[[], Any], lane: str
        ) -> None:
            while True:
                await progress()
                waiting.set()
                await asyncio.sleep(0.01)

    # Long before the drain would be over.
    async with asyncio.timeout(20), serving_engine(bus, model, grammars=SlowCompiler()) as rig:
        await rig.put(f"r-{model}", [1, 2], structured_outputs=JSON)
        await waiting.wait()
        rig.context.shutdown.signal()
    assert await outcomes_of(bus, f"r-{model}") == ["open", "requeued"]


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
    async with serving_engine(bus, model, grammars=FailingCompiler(Overloaded("full"))) as rig:
        await rig.put(f"r-{model}", [1, 2], structured_outputs=JSON)

        async def four() -> list[object]:
            return (await outcomes_of(bus, f"r-{model}"))[3:]

        await until(four)
    outcomes = await outcomes_of(bus, f"r-{model}")
    assert outcomes[:4] == ["open", "requeued"] * 2


async def test_a_grammar_that_is_not_tried_is_a_fault_that_only_the_client_retries(
    bus: Bus,
) -> None:
    model = f"untried-{secrets.token_hex(4)}"
    compiler = FailingCompiler(GrammarNotTried("busy"))
    async with serving_engine(bus, model, grammars=compiler) as rig, asyncio.timeout(20):
        await rig.put(f"r-{model}", [1, 2], structured_outputs=JSON)
        (record,) = [record async for record in follow(bus, f"r-{model}")]
    assert isinstance(record, Failure)
    error = record.error
    assert (error.code, error.fault, error.retryable) == ("grammar_not_tried", "server", True)
    assert (status_of(error), error.retry_after_s, compiler.num_calls) == (503, 5.0, 1)


async def test_speeches_that_wait_leave_room_for_one_that_others_wait_for(bus: Bus) -> None:
    """Otherwise the next stages, full of such speeches, and this engine wait for each other."""
    lead = CodeLead({"audio": ChunkSpec(max_ahead=1)})
    *ahead, needed = (f"ahead-{secrets.token_hex(8)}" for _ in range(4))
    async with serving_engine(bus, "ahead", EngineConfig(max_num_seqs=1), lead=lead) as rig:
        rig.runner.go_on.release(1000)
        for request_id in ahead:
            log = await LogWriter.open(bus, request_id, 1)
            await log.codes(0, [[1], [2]])
            await rig.put(request_id, [1], outputs=["text", "audio"])
        await until(lambda: rig.load()["opening"] >= 2)
        await rig.put(needed, [1])
        async with asyncio.timeout(20):
            _ = [record async for record in follow(bus, needed)]


async def test_the_faster_lane_is_taken_while_the_slower_waits(bus: Bus) -> None:
    running, waiting, *late = (f"lanes-{secrets.token_hex(8)}" for _ in range(4))
    async with serving_engine(bus, "lanes", EngineConfig(max_num_seqs=2)) as rig:
        runner = rig.runner

        async def step_until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(20):
                while not condition():
                    assert waiting not in runner.served
                    runner.go_on.release()
                    await asyncio.sleep(0.01)

        await rig.put(running, [1] * 200, max_tokens=300)
        await step_until(lambda: running in runner.served)
        # For this one there is a slot, but not blocks enough.
        await rig.put(waiting, [2] * 400)
        await step_until(lambda: rig.load()["waiting"] == 1)
        interactive, batch = rig.loop.consumers.values()
        assert (interactive.capacity, batch.capacity) == (2, batch.num_in_flight)
        for request_id in late:
            await rig.put(request_id, [3], lane="interactive", max_tokens=2)
        await step_until(lambda: runner.served.keys() >= set(late))
        runner.go_on.release(1000)
        for request_id in (running, waiting):
            _ = [record async for record in follow(bus, request_id)]
    assert [*runner.served][-1] == waiting


async def test_a_task_that_cannot_be_read_is_over_at_once(bus: Bus) -> None:
    """Its request does not stay in flight until its deadline."""
    model, request_id = "unreadable", f"unreadable-{secrets.token_hex(8)}"
    requests = await consume_requests(bus)
    await bus.publish_without_id(subjects.request(model, request_id), b"what the client wrote")
    accepted = await next_request(requests, model)
    tasks = subjects.STAGES_STREAM, subjects.stages_of(request_id)
    async with serving_engine(bus, model) as rig:
        await bus.publish(
            subjects.stage("engine", model, "interactive", request_id),
            b"garbage",
            subjects.stage_msg_id("engine", request_id, accepted.place, 0),
        )
        async with asyncio.timeout(20):
            (record,) = [record async for record in follow(bus, request_id)]
            # The broker removes the tasks, and reports nothing here.
            while await bus.read_last(*tasks):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert isinstance(record, Failure)
        assert record.error.code == "undecodable_message"
        assert await request_queue.queued_request(bus, accepted.place) is None
        letter = (await dead_letters.find(bus, request_id)).letter
        assert letter.request == b"what the client wrote"
        assert all(consumer.num_in_flight == 0 for consumer in rig.loop.consumers.values())
    await requests.stop()


async def test_a_request_that_ends_while_its_blocks_are_read_is_not_begun(bus: Bus) -> None:
    model, name = f"m-{secrets.token_hex(4)}", f"r-{secrets.token_hex(6)}"
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def read(request: EngineRequest, kv: list[KVBlob]) -> ReceivedKV:
        reading.set()
        await go_on.wait()
        return ReceivedKV([])

    ticket = RequestTicket(bus.now_ms(), bus.now_ms() + 60_000, 1, "pm.test.receipt")
    task = engine_task(name, [1] * 8, model=model, lane="interactive", ticket=ticket)
    kv = [KVBlob(BlobRef("prefill-1", bytes(32), 1), "", 0, 1, b"")]
    task = replace(task, body=replace(task.body, kv=kv))
    subject = subjects.stage("engine", model, "interactive", name)
    await bus.publish(subject, envelope.encode(task, []), name)
    async with (
        serving_engine(bus, model, kv=SimpleNamespace(read=read)) as rig,
        asyncio.timeout(20),
    ):
        await reading.wait()
        await end_request(bus, name, 1, WorkerFailure("it was ended"), [])
        await bus.notify(subjects.ended(name))
        await until(lambda: name in rig.worker._ended)
        go_on.set()
        while rig.loop.num_claimed:
            assert rig.load()["held"] == 0
            await asyncio.sleep(0)
        assert rig.num_steps == 0


class TowerOf:
    """In place of an `ItemEncoder` and its `TowerThread`."""

    def __init__(self, batch_s: float = 0.0) -> None:
        self.thread = self
        self.batch_s = batch_s
        self.lost = asyncio.Event()

    async def work(self) -> None:
        await self.lost.wait()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def close(self) -> None:
        pass


async def lose_tower(bus: Bus) -> None:
    tower = TowerOf()
    async with serving_engine(bus, "lost", encoder=tower) as rig, asyncio.timeout(20):
        tower.lost.set()
        await asyncio.wait([rig.serving])


async def test_a_lost_device_of_the_tower_ends_the_worker(bus: Bus) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await lose_tower(bus)


async def test_a_batch_of_the_tower_that_hangs_ends_the_process(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()
    monkeypatch.setattr(engine_worker, "WATCH_S", 0.01)
    monkeypatch.setattr("os._exit", lambda status: ended.set())
    config = EngineConfig(step_timeout_s=60.0)
    async with serving_engine(bus, "hangs", config, encoder=TowerOf(61.0)), asyncio.timeout(20):
        await ended.wait()
