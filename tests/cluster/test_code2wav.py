"""Sound from codes, by real processes: a stage that only this file defines writes the codes.

    request ──▶ talker ~~codes~~▶ code2wav

The talker writes the prompt's tokens as codes, a few frames at a time. Generators are killed
between chunks and in the middle of them. The sound of a request equals the sound of all its codes
in one piece.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.client import cancel, follow_output
from shared.codec.envelope import TensorData
from shared.protocol import subjects
from shared.protocol.messages import decode_dead_letter
from shared.protocol.records import (
    AudioChunk,
    CodeChunk,
    Failure,
    Finish,
    OutputEnd,
    OutputRecord,
    OutputSummary,
)
from shared.protocol.requests import GenerateRequest, encode_request
from shared.protocol.task_messages import RenderBody, Task
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Done, Ended, Outcome, WorkerLoop
from shared.state.log_records import decode_record, is_final
from shared.state.token_log import last_record
from tests.cluster.processes import (
    Processes,
    joined_sound,
    running,
    sound_of,
    until_nothing_is_left,
)
from tests.generator import voices
from tests.support.waiting import until
from workers import roles
from workers.generator.core.vocoder import Chunk, Samples
from workers.generator.table_vocoder import TableVocoder

ROOT = Path(__file__).parents[2]
SIZES = [3, 5, 8, 8, 8]
CONFIG = f"""
models:
  demo:
    path: {ROOT / "ops" / "demo_model"}
    stages:
      renderer: {{enabled: false}}
      engine: {{enabled: false}}
      talker:
        role: source
        inputs: {{prompt: {{from: request, function: prompt}}}}
        output: {{name: codes, kind: codes}}
      code2wav:
        role: generator
        path: voice
        inputs: {{codes: {{from: talker, function: follow, mode: stream}}}}
        output: {{name: audio, kind: audio}}
        chunks: {{first: [3, 5], size: 8, left: 2, right: 2}}
generator: {{max_batch: 8}}
delivery: {{ack_wait_s: 3.0, drain_s: 5.0, retry_delay_s: 0.1}}
"""
# Heartbeats come every second. By the ack wait of 3 s it is known that a killed worker is dead.
WORKERS = {
    "coordinator": ["coordinator"],
    "talker": ["source", "--stage", "talker"],
    "code2wav": ["generator", "--stage", "code2wav"],
}
FRAMES_A_RECORD = 4
RECORD_S = 0.02
# In place of a code: the talker writes nothing more, until the request has ended.
STALL = 1000
# A code of the table that kills the process which makes sound of it.
DEADLY = voices.NUM_CODES - 1
CHUNK_S = 0.1
"""Minimum time of a chunk, so that a test can kill a generator in the middle of one."""


# -- the processes --------------------------------------------------------------------------------


async def main(context: Context) -> None:
    """Run a talker."""
    loop = WorkerLoop(context)

    async def handle(task: Task[RenderBody], _: list[TensorData], job: Job) -> Outcome:
        codes, log = task.body.prompt.token_ids or [], job.log
        assert log is not None
        logged = [record for record in log.records if isinstance(record, CodeChunk)]
        position = sum(len(record.frames) for record in logged)
        while position < len(codes):
            frames = [[code] for code in codes[position : position + FRAMES_A_RECORD]]
            if [STALL] in frames:
                request_id = task.header.request_id
                while not is_final(await last_record(context.bus, request_id)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                return Ended()
            await log.codes(position, frames)
            position += len(frames)
            await asyncio.sleep(RECORD_S)
        return Done(OutputSummary(units={"frames": position}))

    await loop.add_stage(["demo"], 16, RenderBody, handle)
    context.ready(["demo"], lambda: {"held": loop.num_claimed})
    await loop.run()


def register_roles() -> None:
    roles.register(roles.RoleSpec("source", __name__, "Source", "writes codes"))
    synthesize = TableVocoder.synthesize

    def slowly(self: TableVocoder, chunks: Sequence[Chunk]) -> list[Samples]:
        if any((chunk.codes == DEADLY).any() for chunk in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(CHUNK_S)
        return synthesize(self, chunks)

    # This process alone is a fork that runs a generator.
    TableVocoder.synthesize = slowly  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("code2wav")
    (folder / "pagemill.yaml").write_text(CONFIG)
    voices.write(folder / "voice")
    with running(folder, WORKERS, __name__) as started:
        yield started


# -- requests and their logs ----------------------------------------------------------------------


def codes_of(seed: int, num_frames: int) -> list[int]:
    codes = voices.codes_of(seed, num_frames)[:, 0]
    return [int(code) % DEADLY for code in codes]


async def ask(bus: Bus, request_id: str, codes: list[int], timeout_s: float | None = None) -> None:
    request = GenerateRequest("demo", prompt_token_ids=codes, timeout_s=timeout_s)
    await bus.publish_without_id(subjects.request("demo", request_id), encode_request(request))


async def follow(bus: Bus, request_id: str) -> list[OutputRecord]:
    """The records of a request's sound, to its end."""
    return [record async for record in follow_output(bus, request_id, "audio")]


def check_sound(folder: Path, codes: list[int], records: list[OutputRecord]) -> None:
    """Check that each sample is there once, and equals the sample of the codes in one piece."""
    assert joined_sound(records) == sound_of(folder, codes)


async def final_record(bus: Bus, request_id: str) -> Finish | Failure:
    log = await until(lambda: read_log(bus, request_id))
    (final,) = log
    assert isinstance(final, Finish | Failure)
    return final


async def audio_of(bus: Bus, request_id: str) -> list[Any]:
    """The records of a request's sound so far."""
    subject = subjects.tokens(request_id, "audio")
    return [decode_record(m.data) for m in await bus.read(subjects.TOKENS_STREAM, subject)]


# -- the tests ------------------------------------------------------------------------------------


async def test_the_sound_is_that_of_all_codes_in_one_piece(processes: Processes, bus: Bus) -> None:
    """Requests of all lengths at once, so that chunks of several share batches."""
    requests = {f"calm{n}": codes_of(n, n) for n in (1, 2, 3, 10, 23, 24, 32)}
    for request_id, codes in requests.items():
        await ask(bus, request_id, codes)
    logs = await asyncio.gather(*(follow(bus, request_id) for request_id in requests))
    for (request_id, codes), records in zip(requests.items(), logs, strict=True):
        check_sound(processes.folder, codes, records)
        final = await final_record(bus, request_id)
        assert isinstance(final, Finish)
        assert list(final.outputs) == ["codes", "audio"]
        assert final.outputs["audio"].units == {"samples": len(codes) * voices.SAMPLES_PER_FRAME}
    chunks = [record for record in logs[-1] if isinstance(record, AudioChunk)]
    sizes = [chunk.num_samples // voices.SAMPLES_PER_FRAME for chunk in chunks]
    assert sizes == SIZES
    await until_nothing_is_left(bus)


async def test_a_generator_is_killed_at_every_chunk(processes: Processes, bus: Bus) -> None:
    """Each one is killed when it has written a chunk, while it makes the next one."""
    codes = codes_of(5, sum(SIZES))
    await ask(bus, "killed", codes)
    following = asyncio.create_task(follow(bus, "killed"))
    for num_made in range(1, len(SIZES)):
        await until(partial(has_records, bus, "killed", num_made))
        processes.kill("code2wav")
    records = await following
    check_sound(processes.folder, codes, records)
    attempts = [record.attempt for record in records]
    assert len(set(attempts)) >= len(SIZES) - 1
    assert attempts == sorted(attempts)
    await until_nothing_is_left(bus)


async def has_records(bus: Bus, request_id: str, number: int) -> bool:
    return len(await audio_of(bus, request_id)) >= number


async def test_codes_that_kill_generators_are_given_up_and_harm_no_other_request(
    processes: Processes, bus: Bus
) -> None:
    calm = codes_of(7, 20)
    await ask(bus, "poison", [*codes_of(8, 2), DEADLY, *codes_of(9, 9)])
    await ask(bus, "neighbor", calm)
    num_started = 0

    async def has_ended() -> bool:
        nonlocal num_started
        num_started += processes.restart_if_dead("code2wav")
        return bool(await read_log(bus, "poison"))

    await until(has_ended, 60)
    final = await final_record(bus, "poison")
    assert isinstance(final, Failure)
    assert final.error.code == "poison"
    assert num_started == 2
    (cut,) = await follow(bus, "poison")
    assert isinstance(cut, OutputEnd)
    assert cut.cut
    letter = await bus.read_last(subjects.DEAD_STREAM, subjects.dead("code2wav", "poison"))
    assert letter is not None
    assert decode_dead_letter(letter.data).request_id == "poison"
    check_sound(processes.folder, calm, await follow(bus, "neighbor"))
    await until_nothing_is_left(bus)


@pytest.mark.parametrize("ending", ["cancelled", "deadline_exceeded"])
async def test_a_request_that_is_ended_leaves_nothing(bus: Bus, ending: str) -> None:
    """The talker has stalled after some chunks, and would not end before its deadline."""
    timeout_s = 2.0 if ending == "deadline_exceeded" else None
    await ask(bus, ending, [*codes_of(3, 20), STALL], timeout_s)
    if ending == "cancelled":
        await until(partial(has_records, bus, ending, 2))
        await cancel(bus, ending)
    records = await follow(bus, ending)
    assert isinstance(records[-1], OutputEnd)
    assert records[-1].cut
    final = await final_record(bus, ending)
    assert isinstance(final, Failure)
    assert final.error.code == ending
    await until_nothing_is_left(bus)


async def test_a_request_that_is_cancelled_after_its_codes_have_ended(bus: Bus) -> None:
    """The generator learns of the cancellation only from the notice of the end."""
    await ask(bus, "long", codes_of(4, 400))

    async def codes_have_ended() -> bool:
        subject = subjects.tokens("long", "codes")
        last = await bus.read_last(subjects.TOKENS_STREAM, subject)
        return last is not None and isinstance(decode_record(last.data), OutputEnd)

    await until(codes_have_ended)
    await cancel(bus, "long")
    final = await final_record(bus, "long")
    assert isinstance(final, Failure)
    num_records = len(await audio_of(bus, "long"))
    assert num_records < 40
    await until_nothing_is_left(bus)
    assert len(await audio_of(bus, "long")) == num_records


async def test_a_generator_that_wakes_after_the_end_writes_nothing(
    processes: Processes, bus: Bus
) -> None:
    await ask(bus, "zombie", codes_of(6, 200))
    await until(partial(has_records, bus, "zombie", 2))
    with processes.stopped("code2wav"):
        await cancel(bus, "zombie")
        final = await final_record(bus, "zombie")
    assert isinstance(final, Failure)
    await until_nothing_is_left(bus)
    *chunks, end = await follow(bus, "zombie")
    assert isinstance(end, OutputEnd)
    assert end.cut
    assert await audio_of(bus, "zombie") == [*chunks, end]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("left: 2", "left: 1"), "models.demo.stages.code2wav.chunks.left: 1 is less than 2"),
        (("path: voice", "path: nowhere"), "models.demo.stages.code2wav.path: "),
    ],
)
def test_a_generator_refuses_its_settings_at_its_start(
    processes: Processes, tmp_path: Path, changed: tuple[str, str], message: str
) -> None:
    config = tmp_path / "pagemill.yaml"
    voices.write(tmp_path / "voice")
    config.write_text(CONFIG.replace(*changed))
    process = processes.fork("code2wav", config)
    with contextlib.suppress(Exception):
        process.wait(30)
    process.kill()
    assert process.wait() == 78
    assert message in (processes.folder / "workers.log").read_text()
