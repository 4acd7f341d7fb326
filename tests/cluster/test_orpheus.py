"""Orpheus by real processes: `/v1/audio/speech` with its codes and the sound of SNAC.

    request ──▶ talker ~~codes~~▶ code2wav

Samples equal those of transformers and of the package `snac`, also when both workers are killed in
the middle of a speech.
"""

import asyncio
import base64
from collections.abc import Iterator
from functools import partial

import httpx
import numpy as np
import pytest

from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import AudioChunk, CodeChunk, Failure, Finish, OutputEnd
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import seed_of
from shared.state.log_records import decode_record
from tests import orpheus
from tests.cluster.processes import Processes, running, until_nothing_is_left
from tests.orpheus import PlainOrpheus
from tests.support.slow_steps import slow_down
from tests.support.waiting import until
from workers.engine.runner import ModelRunner

MAX_TOKENS = 175
CONFIG = f"""
models:
  orpheus:
    path: orpheus
    dtype: float64
    stages:
      talker:
        sampling_defaults: {{temperature: 0.0, repetition_penalty: 1.3, max_tokens: {MAX_TOKENS}}}
      code2wav: {{path: snac}}
engine: {{kv_cache_mib: 64}}
gateway: {{port: 0}}
delivery: {{ack_wait_s: 2.0, drain_s: 5.0, retry_delay_s: 0.1}}
"""
WORKERS = {
    "coordinator": ["coordinator"],
    "talker": ["engine", "--stage", "talker", "--model", "orpheus"],
    "code2wav": ["generator", "--stage", "code2wav", "--model", "orpheus"],
    "gateway": ["gateway"],
}
TEXT, SHORT = "three red circles", "Hello"
PIECES = ("Four cats.", "Two blue ones,", "three red circles")
"""Each piece of the long text ends before its limit of 25 frames, and so 20 characters."""
STEP_S = 0.02
"""Minimum time of a step, so that a worker can be killed in the middle of a speech."""


def register_roles() -> None:
    slow_down(ModelRunner, "launch", STEP_S)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "pagemill.yaml").write_text(CONFIG)
    orpheus.write(folder / "orpheus")
    orpheus.write_snac(folder / "snac")
    with running(folder, WORKERS, __name__) as started:
        yield started


@pytest.fixture(scope="module")
def plain(processes: Processes) -> PlainOrpheus:
    return PlainOrpheus(processes.folder / "orpheus", processes.folder / "snac")


async def num_records(bus: Bus, request_id: str, output: str) -> int:
    return len(await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, output)))


async def is_in_second_piece(bus: Bus, request_id: str) -> bool:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, "codes"))
    chunks = [decode_record(message.data) for message in stored]
    ends = [isinstance(c, CodeChunk) and c.end_character is not None for c in chunks]
    return True in ends and ends.index(True) + 1 < len(ends)


async def has(bus: Bus, request_id: str, output: str, number: int) -> bool:
    return await num_records(bus, request_id, output) >= number


async def test_the_sound_over_http_is_that_of_the_reference(
    bus: Bus, url: str, plain: PlainOrpheus
) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        voices = (await http.get("/v1/audio/voices")).json()
        assert [voice["id"] for voice in voices["data"]][:2] == ["tara", "leah"]
        answers = await asyncio.gather(
            *(
                http.post(
                    "/v1/audio/speech",
                    json={"input": text, "voice": voice, "response_format": "pcm"}
                    | {"model": "orpheus"},
                )
                for text, voice in ((TEXT, "tara"), (SHORT, "zoe"))
            )
        )
        for answer, text, voice in zip(answers, (TEXT, SHORT), ("tara", "zoe"), strict=True):
            assert answer.status_code == 200, answer.text
            tokens, _ = plain.speak(text, MAX_TOKENS, voice)
            frames = plain.frames(tokens)
            expected = plain.sound(frames, seed_of(None, answer.headers["pagemill-request-id"]))
            assert np.array_equal(np.frombuffer(answer.content, "<i2"), expected)
        refused = await http.post(
            "/v1/chat/completions",
            json={"model": "orpheus", "messages": [{"role": "user", "content": "Hello"}]},
        )
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "model"
    await until_nothing_is_left(bus)


async def test_both_workers_are_killed_in_the_middle_of_a_long_text(
    processes: Processes, bus: Bus, plain: PlainOrpheus
) -> None:
    request = GenerateRequest(
        "orpheus",
        given_text=" ".join(PIECES),
        outputs=["audio"],
        voice="leo",
    )

    async def output(name: str) -> list[object]:
        return [record async for record in client.follow_output(bus, "killed", name)]

    async def own() -> list[object]:
        return [record async for record in client.ask(bus, request, "killed")]

    speaking = asyncio.gather(own(), output("codes"), output("audio"))
    await until(partial(is_in_second_piece, bus, "killed"))
    processes.kill("talker")
    await until(partial(has, bus, "killed", "audio", 2))
    processes.kill("code2wav")
    records, codes, audio = await speaking
    assert isinstance(records[-1], Finish), records[-1]
    spoken = [plain.speak(piece, MAX_TOKENS, "leo") for piece in PIECES]
    assert [reason for _, reason in spoken] == ["stop"] * 3
    chunks = [record for record in codes if isinstance(record, CodeChunk)]
    frames = [frame for chunk in chunks for frame in chunk.frames]
    assert frames == [frame for tokens, _ in spoken for frame in plain.frames(tokens)]
    ends = [chunk.end_character for chunk in chunks if chunk.end_character is not None]
    assert ends == [11, 26]
    assert len({chunk.attempt for chunk in chunks}) > 1
    end = codes[-1]
    assert isinstance(end, OutputEnd)
    assert (end.summary.units, end.summary.finish_reason) == ({"frames": len(frames)}, "stop")
    assert end.summary.usage is not None
    prompts = [plain.prompt(piece, "leo") for piece in PIECES]
    assert end.summary.usage.prompt_tokens == sum(map(len, prompts))
    pieces = [record for record in audio if isinstance(record, AudioChunk)]
    pcm = b"".join(base64.b64decode(piece.pcm) for piece in pieces)
    assert np.array_equal(np.frombuffer(pcm, "<i2"), plain.sound(frames, seed_of(None, "killed")))
    assert not any(isinstance(record, Failure) for record in [*records, *codes, *audio])
    await until_nothing_is_left(bus)
