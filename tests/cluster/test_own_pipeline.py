"""A pipeline that only this file defines: two more stages, one fan-out, and an output of audio.

    renderer ──▶ engine ~~text~~▶ speak ══word══▶ voice

The engine writes the text. `speak` follows it while it grows, has every word spoken by `voice`, and
writes the sounds in order to the output `audio`. All stages are real processes, which import this
file to know its roles, and each of them is killed in the middle of its work.
"""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.client import ask, follow_output
from shared.codec.envelope import TensorData
from shared.errors import ConfigError
from shared.protocol import subjects
from shared.protocol.multimodal import content_hash
from shared.protocol.records import (
    Finish,
    LogRecord,
    MediaChunk,
    OutputEnd,
    OutputSummary,
    TokenChunk,
)
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import FollowBody, ItemResult, Task, TaskBody
from shared.stage import tasks
from shared.stage.inputs import RequestEnded, follow_text
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Done, Ended, Outcome, WorkerLoop
from shared.state import item_results
from tests.cluster.conftest import until_ready
from tests.cluster.processes import Processes, running, until_nothing_is_left, until_records
from workers import roles, settings

ROOT = Path(__file__).parents[2]
CONFIG = f"""
models:
  demo:
    path: {ROOT / "ops" / "demo_model"}
    sampling_defaults: {{temperature: 0.0}}
    stages:
      speak:
        role: speaker
        inputs: {{text: {{from: engine, function: follow, mode: stream}}}}
        output: {{name: audio, kind: audio}}
      voice:
        role: voice
        inputs: {{word: {{from: speak, function: item, mode: fan_out}}}}
delivery: {{ack_wait_s: 1.5, drain_s: 5.0}}
engine: {{max_appends_per_s: 25, max_num_seqs: 1}}  # Most requests wait when it is killed.
"""
WORKERS = {role: [role] for role in ("coordinator", "renderer", "engine", "voice")}
WORKERS |= {"speak": ["speaker", "--stage", "speak"]}
MAX_TOKENS = 300
VOICE_S = 0.05


class WordBody(TaskBody, frozen=True):
    """For voices: one word."""

    key: str
    word: str


def sound_of(word: str) -> bytes:
    return hashlib.sha256(word.encode()).digest()


async def main(context: Context) -> None:
    """Run a speaker or a voice."""
    loop = WorkerLoop(context)
    if context.role == "speaker":
        await loop.add_stage(["demo"], 8, FollowBody, Speaker(context).handle)
    else:
        await loop.add_stage(["demo"], 8, WordBody, Voice(context).handle)
    context.ready(["demo"], lambda: {"held": loop.num_claimed})
    await loop.run()


class Speaker:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._edge = context.pipelines["demo"].edges_from("speak", "fan_out")[0]

    async def handle(self, task: Task[FollowBody], _: list[TensorData], job: Job) -> Outcome:
        assert job.log is not None
        assert task.body.inputs == {"text": "text"}
        num_spoken = len(job.log.records)
        number = 0
        try:
            async for word in self._words(task):
                number += 1
                if number <= num_spoken:
                    continue  # An earlier attempt has spoken it.
                sound = await self._spoken(task, job, word)
                data = base64.b64encode(sound).decode()
                await job.log.media("audio/raw", number - 1, data=data)
        except RequestEnded:
            return Ended()
        return Done(OutputSummary(units={"words": number}))

    async def _words(self, task: Task[FollowBody]) -> AsyncIterator[str]:
        """The words of the text, each as soon as it is complete."""
        text = ""
        async for chunk in follow_text(self._context.bus, task.header):
            text += "".join(delta.text for delta in chunk.choices)
            *words, text = text.split(" ")
            for word in words:
                yield word
        yield text

    async def _spoken(self, task: Task[FollowBody], job: Job, word: str) -> bytes:
        bus = self._context.bus
        key = content_hash("word", word)

        async def get() -> bytes | None:
            result = await item_results.get(bus, key)
            return None if result is None else result.data

        if (speech := await get()) is not None:
            return speech
        body = WordBody(key, word)
        await tasks.publish_item(bus, self._edge, task.header, key, body, [])
        return await item_results.wait(bus, key, get, lambda: job.delivery.progress())


class Voice:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def handle(self, task: Task[WordBody], _: list[TensorData], __: Job) -> Outcome:
        await asyncio.sleep(VOICE_S)
        result = ItemResult(data=sound_of(task.body.word))
        await item_results.publish(self._context.bus, task.body.key, result)
        return Done()


def register_roles() -> None:
    for name in ("speaker", "voice"):
        roles.register(roles.RoleSpec(name, __name__, name.title(), "speaks"))


# -- the test -------------------------------------------------------------------------------------


async def speak(bus: Bus, request_id: str, question: str) -> tuple[list[LogRecord], list[object]]:
    """The records of a request's text and of its audio."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
    request = GenerateRequest(
        "demo", [Message("user", question)], sampling, outputs=["text", "audio"]
    )

    async def text() -> list[LogRecord]:
        return [record async for record in ask(bus, request, request_id)]

    async def audio() -> list[object]:
        return [record async for record in follow_output(bus, request_id, "audio")]

    logs = await asyncio.gather(text(), audio())
    return logs[0], logs[1]


def check_answer(records: list[LogRecord], audio: list[object]) -> str:
    """Check that text and audio are complete and agree, and return the text."""
    assert [record.index for record in records] == list(range(len(records)))
    finish = records[-1]
    assert isinstance(finish, Finish)
    assert finish.usage.completion_tokens == MAX_TOKENS
    assert list(finish.outputs) == ["audio"]
    stages = {span.stage for span in finish.path}
    assert stages == {"coordinator", "renderer", "engine", "speak"}
    chunks = [record for record in records if isinstance(record, TokenChunk)]
    assert len(chunks) == len(records) - 1
    positions = [delta.position for chunk in chunks for delta in chunk.choices]
    assert positions == sorted(positions)
    text = "".join(delta.text for chunk in chunks for delta in chunk.choices)
    *sounds, end = audio
    assert isinstance(end, OutputEnd)
    assert not end.cut
    spoken = [record for record in sounds if isinstance(record, MediaChunk)]
    assert [record.offset for record in spoken] == list(range(len(text.split(" "))))
    assert [base64.b64decode(record.data) for record in spoken] == [
        sound_of(word) for word in text.split(" ")
    ]
    assert finish.outputs["audio"].units == {"words": len(spoken)}
    return text


async def ask_amid_kills(
    bus: Bus, processes: Processes, prefix: str
) -> list[tuple[list[LogRecord], list[object]]]:
    """Return the logs of five requests whose workers of all stages are killed; each ends once."""
    questions = {f"{prefix}{n}": f"What is {n}? What can you do?" for n in range(4)}
    questions[f"{prefix}again"] = "What can you do?"
    answers = [
        asyncio.create_task(speak(bus, request_id, question))
        for request_id, question in questions.items()
    ]
    first = f"{prefix}0"
    await until_records(bus, subjects.STAGES_STREAM, subjects.stages_of(first))
    processes.kill("renderer")
    processes.kill("coordinator")
    await until_records(bus, subjects.TOKENS_STREAM, subjects.tokens(first))
    processes.kill("engine")
    await until_records(bus, subjects.TOKENS_STREAM, subjects.tokens(first, "audio"), 3)
    processes.kill("speak")
    processes.kill("voice")
    logs = await asyncio.gather(*answers)
    for request_id in questions:
        assert len([r for r in await read_log(bus, request_id) if isinstance(r, Finish)]) == 1
    return logs


@pytest.mark.timeout(240)
async def test_every_stage_of_an_own_pipeline_may_be_killed(tmp_path: Path) -> None:
    (tmp_path / "pagemill.yaml").write_text(CONFIG)
    with running(tmp_path, WORKERS, __name__) as processes:
        bus = await Bus.connect(processes.url, "test")
        async with asyncio.timeout(200):
            await until_ready(bus, WORKERS)
            alone = check_answer(*await speak(bus, "calm", "What can you do?"))
            hit: set[str] = set()
            # A stage that has ended its part of all requests has none to take up again.
            for round_number in range(4):
                logs = await ask_amid_kills(bus, processes, f"r{round_number}-")
                texts = [check_answer(*answer) for answer in logs]
                assert texts[-1] == alone, "a killed stage changes nothing of an answer"
                spans = [span for records, _ in logs for span in records[-1].path]  # type: ignore[union-attr]
                hit |= {span.stage for span in spans if span.attempt > 1}
                if hit >= {"engine", "speak"}:
                    break
            assert hit >= {"engine", "speak"}
            await until_nothing_is_left(bus)
            assert await bus.read_last(subjects.DEAD_STREAM, subjects.DEAD_FILTER) is None
        await bus.close()


async def test_without_its_roles_the_pipeline_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "pagemill.yaml"
    config.write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"models\.demo\.stages\.speak\.role: no role 'speaker'"):
        settings.load_config(config)
