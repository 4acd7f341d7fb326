"""Qwen3-Omni by real processes, with tiny random weights: thinker, talker and code2wav.

Text ids, the codes of all codebooks and samples equal those of transformers' `generate` in float64,
also when a worker of each stage is killed in the middle of its work.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import CodeChunk, Finish, LogRecord, OutputRecord, TokenChunk
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from tests import omni
from tests.cluster.processes import (
    Processes,
    joined_sound,
    running,
    until_nothing_is_left,
    until_ready,
    until_records,
)
from workers.engine.runner import ModelRunner

NUM_TOKENS, NUM_FRAMES = 24, 30
CONFIG = f"""
models:
  omni:
    path: model
    dtype: float64
    graph: qwen3-omni
    sampling_defaults: {{temperature: 0.0, max_tokens: {NUM_TOKENS}}}
    stages:
      talker:
        sampling_defaults: {{temperature: 0.0, repetition_penalty: 1.05, max_tokens: {NUM_FRAMES}}}
        voices: [Ethan, Chelsie]
      code2wav: {{chunks: {{first: [3], size: 5, left: 40, right: 1}}}}
engine: {{kv_cache_mib: 64}}
delivery: {{ack_wait_s: 2.0, drain_s: 5.0, retry_delay_s: 0.1}}
"""
WORKERS = {
    "coordinator": ["coordinator"],
    "renderer": ["renderer"],
    "engine": ["engine", "--model", "omni"],
    "talker": ["engine", "--stage", "talker", "--model", "omni"],
    "code2wav": ["generator", "--stage", "code2wav", "--model", "omni"],
}
STEP_S = 0.03
"""How long a step takes here at least, so that a worker can be killed in the middle of its work."""
QUESTIONS = ["Hi", "Count three red circles."]


def register_roles() -> None:
    run = ModelRunner.run

    def slowly(self: ModelRunner, batch: Any) -> Any:
        time.sleep(STEP_S)
        return run(self, batch)

    # This process alone is a fork that runs an engine.
    ModelRunner.run = slowly  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("omni")
    (folder / "pagemill.yaml").write_text(CONFIG)
    omni.write_qwen3(folder / "model")
    with running(folder, WORKERS, __name__) as started:
        yield started


@pytest.fixture(scope="module")
def answers(processes: Processes) -> dict[str, omni.SpokenAnswer]:
    """What transformers says."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = omni.reference_qwen3(processes.folder / "model")
    found = {
        question: omni.speak_qwen3(model, omni.user_prompt(question), NUM_TOKENS, NUM_FRAMES)
        for question in QUESTIONS
    }
    torch.set_num_threads(num_threads)
    return found


@pytest.fixture
async def bus(processes: Processes) -> AsyncIterator[Bus]:
    connected = await Bus.connect(processes.url, "test")
    await until_ready(connected, WORKERS)
    yield connected
    await connected.close()


class Said(NamedTuple):
    text: list[LogRecord]
    codes: list[OutputRecord]
    audio: list[OutputRecord]


async def ask(bus: Bus, question: str, request_id: str) -> Said:
    request = GenerateRequest(
        "omni",
        prompt_token_ids=omni.user_prompt(question),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
        outputs=["text", "audio"],
    )

    async def output(name: str) -> list[OutputRecord]:
        return [record async for record in client.follow_output(bus, request_id, name)]

    async def own() -> list[LogRecord]:
        return [record async for record in client.ask(bus, request, request_id)]

    return Said(*await asyncio.gather(own(), output("codes"), output("audio")))


def check(said: Said, wanted: omni.SpokenAnswer) -> None:
    *chunks, finish = said.text
    assert isinstance(finish, Finish), finish
    deltas = [d for chunk in chunks if isinstance(chunk, TokenChunk) for d in chunk.choices]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == wanted.token_ids
    frames = [frame for r in said.codes if isinstance(r, CodeChunk) for frame in r.frames]
    assert frames == wanted.frames
    sound = np.frombuffer(joined_sound(said.audio), "<i2")
    np.testing.assert_array_equal(sound, omni.pcm(wanted.sound))
    assert {span.stage for span in finish.path} >= {"engine", "talker", "code2wav"}


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
async def test_every_stage_is_killed_once_and_all_is_what_transformers_says(
    processes: Processes, bus: Bus, answers: dict[str, omni.SpokenAnswer]
) -> None:
    assert all(len(answer.frames) == NUM_FRAMES for answer in answers.values())
    undisturbed = asyncio.create_task(ask(bus, QUESTIONS[1], "undisturbed"))
    check(await undisturbed, answers[QUESTIONS[1]])
    asked = asyncio.create_task(ask(bus, QUESTIONS[0], "killed"))
    for stage, output, number in (
        ("engine", "text", 3),
        ("talker", "codes", 3),
        ("code2wav", "audio", 2),
    ):
        await until_records(bus, subjects.TOKENS_STREAM, subjects.tokens("killed", output), number)
        processes.kill(stage)
    said = await asked
    check(said, answers[QUESTIONS[0]])
    for records in said:
        assert len({record.attempt for record in records}) == 2
    await until_nothing_is_left(bus)
