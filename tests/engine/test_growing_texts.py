"""An engine worker with a talker that speaks a text while it is written."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence

import pytest

from shared.bus.bus import Bus
from shared.client import follow
from shared.errors import LogTruncated, WorkerFailure
from shared.protocol import subjects
from shared.protocol.messages import decode_attempt
from shared.protocol.records import AnyRecord, Failure, Finish, TokenChunk
from shared.protocol.task_messages import EngineBody, Task
from shared.stage.inputs import RequestEnded
from shared.stage.job import Job
from shared.state.request_status import find
from shared.state.token_log import end_request
from tests.support.engine import EngineRig, serving_engine
from tests.support.waiting import until
from workers.engine import worker as engine_worker
from workers.engine.core.sequence import SpokenText
from workers.engine.stage_output import Progress, Rendered, TextOutput

PROMPT = [1, 2, 3, 4]
NUM_TOKENS = 6


class Typist(TextOutput):
    """Each number in the queue is the number of tokens that can be spoken; None is the end."""

    def __init__(self) -> None:
        self.typed: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.num_readers = 0

    async def render(
        self, task: Task[EngineBody], records: Sequence[AnyRecord], progress: Progress
    ) -> Rendered:
        return Rendered(task, self.spoken_text(0), growth=self.growth())

    def spoken_text(self, number: int | None) -> SpokenText:
        return SpokenText([], [], None, None if number is None else len(PROMPT) - 1 + number)

    async def growth(self) -> AsyncGenerator[SpokenText]:
        self.num_readers += 1
        try:
            while True:
                typed = await self.typed.get()
                if isinstance(typed, Exception):
                    raise typed
                yield self.spoken_text(typed)
                if typed is None:
                    return
        finally:
            self.num_readers -= 1


class Rig:
    """An engine with one request, whose steps take no time."""

    def __init__(self, bus: Bus, engine: EngineRig, typist: Typist) -> None:
        self.bus, self.engine, self.typist = bus, engine, typist
        self.name = f"typed-{secrets.token_hex(8)}"

    async def until_it_waits(self) -> None:
        await until(lambda: self.engine.load()["without_input"] == 1)

    async def until_it_is_idle(self) -> None:
        def is_idle() -> bool:
            load = self.engine.load()
            return load["held"] == load["running"] == 0 and load["free_blocks"] == load["blocks"]

        await until(is_idle)


@pytest.fixture
async def rig(bus: Bus) -> AsyncGenerator[Rig]:
    typist = Typist()
    async with serving_engine(bus, f"m-{secrets.token_hex(4)}", output=typist) as engine:
        engine.runner.go_on.release(1000)
        rig = Rig(bus, engine, typist)
        await engine.put(rig.name, PROMPT, max_tokens=NUM_TOKENS)
        await rig.until_it_waits()
        yield rig
        assert typist.num_readers == 0
        load = engine.load()
        assert load["held"] == 0
        assert load["free_blocks"] == load["blocks"]


async def test_a_drain_requeues_a_request_that_waits_for_its_text(rig: Rig) -> None:
    shutdown = rig.engine.context.shutdown
    shutdown.asked.set()
    shutdown.hurry.set()

    async def is_requeued() -> bool:
        subject = subjects.attempts(rig.name)
        stored = await rig.bus.read(subjects.ATTEMPTS_STREAM, subject)
        attempts = (decode_attempt(message.data) for message in stored)
        return [a and a.outcome for a in attempts] == ["open", "requeued"]

    await until(is_requeued)
    await rig.until_it_is_idle()


async def test_a_request_continues_as_its_text_arrives(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, the worker reports progress to the broker."""
    monkeypatch.setattr(engine_worker, "WATCH_S", 0.01)
    reported: list[list[str | None]] = []

    def progressed(jobs: Iterable[Job]) -> None:
        reported.append([job.request_id for job in jobs])

    monkeypatch.setattr(rig.engine.context.stage.claims, "progressed", progressed)
    await until(lambda: [rig.name] in reported)

    async def is_explained() -> bool:
        return "wait for more of a text" in (await find(rig.bus, rig.name)).why

    await until(is_explained)
    reading = follow(rig.bus, rig.name)
    rig.typist.typed.put_nowait(1)
    first = await anext(reading)
    assert isinstance(first, TokenChunk)
    assert len(first.choices[0].token_ids) == 1
    await rig.until_it_waits()
    for num_tokens in (2, 2, 4, None):
        rig.typist.typed.put_nowait(num_tokens)
    async with asyncio.timeout(20):
        *chunks, last = [record async for record in reading]
    assert isinstance(last, Finish)
    assert last.usage.completion_tokens == NUM_TOKENS
    # A step that the thread does not begin is not counted: of the prompt's first part, and tokens.
    assert rig.engine.num_steps == 1 + NUM_TOKENS
    await rig.until_it_is_idle()
    assert all(record.attempt == 1 for record in chunks)


async def test_a_text_that_cannot_be_read_fails_its_request(rig: Rig) -> None:
    rig.typist.typed.put_nowait(LogTruncated("gone"))
    async with asyncio.timeout(20):
        (record,) = [record async for record in follow(rig.bus, rig.name)]
    assert isinstance(record, Failure)
    assert record.error.code == LogTruncated.code
    await rig.until_it_is_idle()


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_request_that_ends_while_it_waits_is_let_go(rig: Rig, is_noticed: bool) -> None:
    await end_request(rig.bus, rig.name, 1, WorkerFailure("it was ended"), [])
    if is_noticed:
        await rig.bus.notify(subjects.ended(rig.name))
    else:
        rig.typist.typed.put_nowait(RequestEnded())
    await rig.until_it_is_idle()
