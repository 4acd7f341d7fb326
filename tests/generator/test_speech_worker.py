"""The generator's worker on a real broker, with a vocoder that waits until the test releases it."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.config.schema import Config, DeliveryConfig, ModelConfig, StageConfig
from shared.errors import Cancelled, ConfigError
from shared.protocol import subjects
from shared.protocol.chunks import ChunkSpec
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.records import AudioChunk, Failure, OutputEnd, OutputSummary
from shared.protocol.task_messages import FollowBody, TaskHeader
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.stage import Stage
from shared.state import output_ends
from shared.state.log_records import decode_record
from shared.state.token_log import LogWriter, end_request
from tests.generator.test_vocoder_thread import CountingVocoder, began
from tests.shared.stage.test_worker_loop import accept, put, settled
from tests.support.waiting import until
from workers.generator import main, speech_worker
from workers.generator.speech_worker import SpeechWorker
from workers.generator.vocoder_thread import VocoderThread

OUTPUTS = ["codes", "audio"]
STAGES: dict[str, dict[str, Any]] = {
    "renderer": {"enabled": False},
    "engine": {"enabled": False},
    "talker": {
        "role": "engine",
        "inputs": {"prompt": {"from": "request", "function": "prompt"}},
        "output": {"name": "codes", "kind": "codes"},
    },
    "code2wav": {
        "role": "generator",
        "inputs": {"codes": {"from": "talker", "function": "follow", "mode": "stream"}},
        "output": {"name": "audio", "kind": "audio"},
        "chunks": {"size": 1, "left": 0, "right": 0},
    },
}


def make_context(bus: Bus, model: str, **changes: Any) -> Context:
    """The context of a worker, with these changes to its stage."""
    stages = STAGES | {"code2wav": STAGES["code2wav"] | changes}
    delivery = DeliveryConfig(ack_wait_s=5.0, drain_s=5.0)
    config = Config(
        {model: ModelConfig("nowhere", stages=msgspec.convert(stages, dict[str, StageConfig]))},
        delivery=delivery,
    )
    name, log = f"generator-{secrets.token_hex(4)}", structlog.get_logger()
    return Context("generator", name, model, config, bus, log)


@contextlib.asynccontextmanager
async def serving(
    bus: Bus, model: str, vocoder: CountingVocoder, thread: VocoderThread
) -> AsyncIterator[Context]:
    """Run a worker until the end of the block. The test may stop it earlier."""
    context = make_context(bus, model)
    chunks = ChunkSpec(size=1, left=0, right=0)
    running = asyncio.create_task(SpeechWorker(context, model, thread, chunks, vocoder).serve())
    try:
        yield context
    finally:
        vocoder.may_go_on.release(100)
        context.shutdown.begin()
        await running
        await context.close()


async def spoken(bus: Bus, model: str, codes: list[int], *, ended: bool = True) -> TaskHeader:
    """Publish the task of a request with these codes, and return its header."""
    request_id = f"t-{secrets.token_hex(6)}"
    ticket = await accept(bus, model, request_id)
    await output_ends.begin(bus, request_id, OUTPUTS)
    header = TaskHeader(request_id, model, "interactive", ticket, outputs=OUTPUTS)
    log = await LogWriter.open(bus, request_id, 1, "codes")
    if codes:
        await log.codes(0, [[code] for code in codes])
    if ended:
        await log.end(OutputSummary())
        await output_ends.add(bus, request_id, "codes", OutputSummary())
    await put(bus, "code2wav", header, FollowBody({"codes": "codes"}))
    return header


async def audio_of(bus: Bus, header: TaskHeader) -> list[Any]:
    subject = subjects.tokens(header.request_id, "audio")
    return [decode_record(m.data) for m in await bus.read(subjects.TOKENS_STREAM, subject)]


async def attempts_of(bus: Bus, header: TaskHeader) -> list[AttemptRecord | None]:
    subject = subjects.attempts(header.request_id)
    return [decode_attempt(m.data) for m in await bus.read(subjects.ATTEMPTS_STREAM, subject)]


async def test_the_chunk_of_a_request_that_has_ended_is_not_computed(bus: Bus, model: str) -> None:
    vocoder = CountingVocoder()
    thread = VocoderThread(vocoder, max_batch=1)
    async with serving(bus, model, vocoder, thread):
        first = await spoken(bus, model, [1])
        await began(vocoder)
        second = await spoken(bus, model, [2])

        async def is_waiting() -> bool:
            return thread.num_waiting == 1

        async def waits_no_more() -> bool:
            return thread.num_waiting == 0

        await until(is_waiting)
        await end_request(bus, second.request_id, 1, Cancelled("cancelled"), [])
        await bus.notify(subjects.ended(second.request_id))
        await until(waits_no_more)
        vocoder.may_go_on.release(10)
        await settled(bus, first)
        await settled(bus, second)
    assert vocoder.batches == [[1]]
    assert [type(record) for record in await audio_of(bus, first)] == [AudioChunk, OutputEnd]
    (cut,) = await audio_of(bus, second)
    assert cut.cut


async def test_a_worker_that_stops_leaves_the_rest_to_another_one(bus: Bus, model: str) -> None:
    stopping = CountingVocoder()
    async with serving(bus, model, stopping, VocoderThread(stopping, 1)) as context:
        header = await spoken(bus, model, [5, 6, 7])
        await began(stopping)
        context.shutdown.begin()
        stopping.may_go_on.release(10)
    assert stopping.batches == [[5]]
    (first_chunk,) = await audio_of(bus, header)
    assert first_chunk.num_samples == 1
    next_one = CountingVocoder()
    next_one.may_go_on.release(10)
    async with serving(bus, model, next_one, VocoderThread(next_one, 1)):
        await settled(bus, header)
    assert next_one.batches == [[6], [7]]
    *chunks, end = await audio_of(bus, header)
    assert [chunk.first_sample for chunk in chunks] == [0, 1, 2]
    assert end.summary.units == {"samples": 3}
    outcomes = [a.outcome for a in await attempts_of(bus, header) if a is not None]
    assert outcomes == ["open", "requeued", "open"]


async def test_a_speech_without_codes_is_no_sound(bus: Bus, model: str) -> None:
    vocoder = CountingVocoder()
    async with serving(bus, model, vocoder, VocoderThread(vocoder, 1)):
        header = await spoken(bus, model, [])
        await settled(bus, header)
    (end,) = await audio_of(bus, header)
    assert (end.cut, end.summary.units) == (False, {"samples": 0})


async def test_codes_that_the_vocoder_does_not_have_end_the_request(bus: Bus, model: str) -> None:
    vocoder = CountingVocoder()
    async with serving(bus, model, vocoder, VocoderThread(vocoder, 1)):
        vocoder.may_go_on.release(10)
        header = await spoken(bus, model, [5, vocoder.num_codes])
        await settled(bus, header)
    (final,) = await read_log(bus, header.request_id)
    assert isinstance(final, Failure)
    assert final.error.code == "internal_error"
    assert final.error.message == "frame 1 has codes outside of 0 to 99"
    assert vocoder.batches == []
    letter = subjects.dead("code2wav", header.request_id)
    assert await bus.read_last(subjects.DEAD_STREAM, letter) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"output": None},
        {"output": {"name": "audio", "kind": "text"}},
        {"inputs": {"prompt": STAGES["talker"]["inputs"]["prompt"]}, "chunks": None},
    ],
)
async def test_a_stage_that_makes_no_sound_of_codes_is_refused(
    bus: Bus, model: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="a generator needs an input 'codes' and an output") as e:
        await main.main(make_context(bus, model, **changes))
    assert e.value.field == f"models.{model}.stages.code2wav"


@pytest.fixture
def suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job counts as one that a worker may have died of, and waits for its frames briefly."""
    claim = Stage.claim

    async def suspecting(self: Stage, job: Job) -> LogWriter | None:
        log = await claim(self, job)
        job.suspect = True
        return log

    monkeypatch.setattr(Stage, "claim", suspecting)
    monkeypatch.setattr(speech_worker, "SUSPECT_WAIT_S", 0.3)


@pytest.mark.usefixtures("suspects")
async def test_a_suspect_without_frames_makes_room_for_others(bus: Bus, model: str) -> None:
    """A worker runs one suspect at a time, and a talker may take minutes."""
    vocoder = CountingVocoder()
    async with serving(bus, model, vocoder, VocoderThread(vocoder, 1)):
        header = await spoken(bus, model, [], ended=False)

        async def is_requeued() -> bool:
            return any(a and a.outcome == "requeued" for a in await attempts_of(bus, header))

        await until(is_requeued)
        await end_request(bus, header.request_id, 1, Cancelled("cancelled"), [])


@pytest.mark.usefixtures("suspects")
async def test_a_suspect_with_frames_has_all_the_time_that_it_needs(bus: Bus, model: str) -> None:
    vocoder = CountingVocoder()
    async with serving(bus, model, vocoder, VocoderThread(vocoder, 1)):
        header = await spoken(bus, model, [5])
        await began(vocoder)
        await asyncio.sleep(0.5)
        vocoder.may_go_on.release(10)
        await settled(bus, header)
    assert vocoder.batches == [[5]]
    assert [a.outcome for a in await attempts_of(bus, header) if a is not None] == ["open"]
