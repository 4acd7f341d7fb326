"""From text to speech by real processes: an engine that writes codes, then a generator.

    request ──▶ renderer ──▶ engine ~~text~~▶ talker ~~codes~~▶ code2wav

Texts, codes and samples equal the output of a plain loop over transformers and of the vocoder
alone, also when the workers are killed in the middle of a speech.
"""

import asyncio
import io
import os
import wave
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForImageTextToText, AutoTokenizer

from shared import client
from shared.bus.bus import Bus
from shared.errors import ConfigError
from shared.protocol import subjects
from shared.protocol.records import (
    CodeChunk,
    Failure,
    Finish,
    LogRecord,
    OutputEnd,
    OutputRecord,
    TokenChunk,
)
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from shared.state.log_records import decode_record
from shared.state.token_log import last_record
from tests import preloaded, talkers
from tests.cluster.processes import (
    Processes,
    joined_sound,
    running,
    sound_of,
    until_nothing_is_left,
)
from tests.gateway.batches.conftest import begin, ended, lines_of, results_of
from tests.generator import voices
from tests.support.slow_steps import slow_down
from tests.support.waiting import until
from tests.talkers import PlainTalker
from workers import settings
from workers.engine.runner import ModelRunner

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "ops" / "demo_model"
MAX_CODES = 60
# Frames; with an append for each chunk, a talker alone is never so far ahead.
MAX_AHEAD = 30
MAX_WAIT_S = 4.0
MAX_TASKS = 4
CONFIG = f"""
models:
  demo:
    path: {DEMO_MODEL}
    dtype: float64
    sampling_defaults: {{temperature: 0.0, max_tokens: 16}}
    stages:
      talker:
        role: engine
        path: talker
        inputs: {{text: {{from: engine, function: speech, mode: stream}}}}
        output: {{name: codes, kind: codes}}
        sampling_defaults: {{temperature: 0.0, max_tokens: {MAX_CODES}}}
        voices: [alloy, echo]
        frames_per_character: 1.2
      code2wav:
        role: generator
        path: voice
        inputs: {{codes: {{from: talker, function: follow, mode: stream}}}}
        output: {{name: audio, kind: audio, timed: true}}
        chunks: {{first: [3, 5], size: 8, left: 2, right: 2, max_ahead: {MAX_AHEAD}}}
        max_wait_s: {MAX_WAIT_S}
  mute:
    path: {DEMO_MODEL}
engine: {{kv_cache_mib: 64}}
generator: {{max_tasks: {MAX_TASKS}}}
gateway: {{port: 0}}
delivery: {{ack_wait_s: 2.0, drain_s: 5.0, retry_delay_s: 0.1}}
"""
# Workers of the model `mute` are not needed.
WORKERS = {
    "coordinator": ["coordinator"],
    "renderer": ["renderer"],
    "engine": ["engine", "--model", "demo"],
    "talker": ["engine", "--stage", "talker", "--model", "demo"],
    "code2wav": ["generator", "--stage", "code2wav", "--model", "demo"],
    "gateway": ["gateway"],
    "batcher": ["batcher"],
}
STEP_S = 0.02
"""Minimum time of a step, so that a worker can be killed in the middle of a speech."""
TEXTS = [f"three {color} circles" for color in ("red", "blue", "green")]


def register_roles() -> None:
    slow_down(ModelRunner, "launch", STEP_S)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("speech")
    (folder / "pagemill.yaml").write_text(CONFIG)
    voices.write(folder / "voice")
    talkers.write(folder / "talker")
    with running(folder, WORKERS, __name__) as started:
        yield started


@pytest.fixture(scope="module")
def talker(processes: Processes) -> PlainTalker:
    return PlainTalker(processes.folder / "talker")


# -- requests and what they have made -------------------------------------------------------------


class Spoken(NamedTuple):
    records: list[LogRecord]
    codes: list[OutputRecord]
    audio: list[OutputRecord]

    @property
    def finish(self) -> Finish:
        assert isinstance(self.records[-1], Finish), self.records[-1]
        return self.records[-1]


def given(text: str, **more: Any) -> GenerateRequest:
    return GenerateRequest("demo", given_text=text, outputs=["audio"], **more)


async def speak(bus: Bus, request: GenerateRequest, request_id: str) -> Spoken:
    async def output(name: str) -> list[OutputRecord]:
        return [record async for record in client.follow_output(bus, request_id, name)]

    async def own() -> list[LogRecord]:
        return [record async for record in client.ask(bus, request, request_id)]

    return Spoken(*await asyncio.gather(own(), output("codes"), output("audio")))


def check_speech(
    folder: Path, talker: PlainTalker, text: str, spoken: Spoken, voice: str = "alloy"
) -> None:
    """Check that codes and samples equal the output of talker and vocoder alone, each once."""
    codes, reason = talker.speak(text, MAX_CODES, voice)
    *chunks, end = spoken.codes
    assert isinstance(end, OutputEnd)
    frames: list[int] = []
    for chunk in chunks:
        assert isinstance(chunk, CodeChunk)
        assert chunk.position == len(frames)
        frames += [code for (code,) in chunk.frames]
    assert frames == codes
    assert not end.cut
    assert end.summary.units == {"frames": len(codes)}
    assert end.summary.finish_reason == reason
    assert joined_sound(spoken.audio) == sound_of(folder, codes)
    summary = spoken.finish.outputs["audio"]
    assert summary.units == {"samples": len(codes) * voices.SAMPLES_PER_FRAME}


async def num_records(bus: Bus, request_id: str, output: str) -> int:
    return len(await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, output)))


# -- the tests ------------------------------------------------------------------------------------


@torch.no_grad()
def plain_text(prompt: list[int], num_tokens: int) -> list[int]:
    model: Any = AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float64)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


async def test_text_codes_and_samples_are_those_of_plain_loops(
    processes: Processes, bus: Bus, talker: PlainTalker
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompt = tokenizer("What can you do?")["input_ids"]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    request = GenerateRequest(
        "demo", prompt_token_ids=prompt, sampling_params=sampling, outputs=["text", "audio"]
    )
    pairs = zip(TEXTS, ["alloy", "echo", None], strict=True)
    alone = {text: given(text, voice=voice) for text, voice in pairs}
    answer, *others = await asyncio.gather(
        speak(bus, request, "answer"),
        *(speak(bus, other, f"text{number}") for number, other in enumerate(alone.values())),
    )
    chunks = [record for record in answer.records if isinstance(record, TokenChunk)]
    token_ids = [t for chunk in chunks for delta in chunk.choices for t in delta.token_ids]
    assert token_ids == plain_text(prompt, 12)
    text = "".join(delta.text for chunk in chunks for delta in chunk.choices)
    check_speech(processes.folder, talker, text, answer)
    stages = {span.stage for span in answer.finish.path}
    assert stages == {"coordinator", "renderer", "engine", "talker", "code2wav"}
    assert answer.finish.usage.completion_tokens == 12
    for (text, other), spoken in zip(alone.items(), others, strict=True):
        check_speech(processes.folder, talker, text, spoken, other.voice or "alloy")
        # A text that is given needs neither a renderer nor an engine that writes one.
        stages = {span.stage for span in spoken.finish.path}
        assert stages == {"coordinator", "talker", "code2wav"}
        assert len(spoken.records) == 1
    reasons = {talker.speak(text, MAX_CODES)[1] for text in TEXTS}
    assert reasons == {"stop", "length"}, "the tests have speeches of both kinds"
    await until_nothing_is_left(bus)


@pytest.mark.long
async def test_every_stage_is_killed_in_the_middle_of_a_speech(
    processes: Processes, bus: Bus, talker: PlainTalker
) -> None:
    """Both the talker, twice, and the vocoder; the request's text is one that no engine wrote."""
    text = next(text for text in TEXTS if len(talker.speak(text, MAX_CODES)[0]) > 40)
    speaking = asyncio.create_task(speak(bus, given(text), "killed"))
    for number in (2, 5):
        await until(partial(has, bus, "killed", "codes", number))
        processes.kill("talker")
    await until(partial(has, bus, "killed", "audio", 3))
    processes.kill("code2wav")
    spoken = await speaking
    check_speech(processes.folder, talker, text, spoken)
    attempts = [record.attempt for record in spoken.codes]
    # One more where the talker was put off until the new vocoder had begun.
    assert len(set(attempts)) in (3, 4)
    assert attempts == sorted(attempts)
    assert len({record.attempt for record in spoken.audio}) == 2
    await until_nothing_is_left(bus)


async def has(bus: Bus, request_id: str, output: str, number: int) -> bool:
    return await num_records(bus, request_id, output) >= number


async def test_a_talker_that_drains_hands_back_what_waits_for_its_text(
    processes: Processes, bus: Bus, talker: PlainTalker
) -> None:
    request = GenerateRequest("demo", prompt="What can you do?", outputs=["text", "audio"])
    waiting = asyncio.create_task(speak(bus, request, "drained"))
    await until(partial(has, bus, "drained", "text", 1))
    with processes.stopped("engine"):
        await until(partial(is_opening, bus))
        processes.drain("talker")
    spoken = await waiting
    chunks = [record for record in spoken.records if isinstance(record, TokenChunk)]
    text = "".join(delta.text for chunk in chunks for delta in chunk.choices)
    check_speech(processes.folder, talker, text, spoken)
    await until_nothing_is_left(bus)


async def is_opening(bus: Bus) -> bool:
    return any(b.stage == "talker" and b.load["opening"] for b in await bus.heartbeats.read())


async def test_talkers_wait_for_a_vocoder_that_stands_still_and_text_does_not(
    processes: Processes, bus: Bus, talker: PlainTalker
) -> None:
    spoken = [(text, voice) for text in TEXTS for voice in ("alloy", "echo")]
    expected = [len(talker.speak(text, MAX_CODES, voice)[0]) for text, voice in spoken]
    is_long = [num > MAX_AHEAD for num in expected]
    assert sum(is_long) >= 2
    assert len(spoken) > MAX_TASKS
    with processes.stopped("code2wav"):
        speeches = [
            asyncio.create_task(speak(bus, given(text, voice=voice), f"held{number}"))
            for number, (text, voice) in enumerate(spoken)
        ]
        # The long speeches wait without a sequence, and no KV block is held.
        await until(partial(are_held, bus, sum(is_long)))
        for number, held in enumerate(is_long):
            num_frames = await num_codes(bus, f"held{number}")
            # A step's frames are in the log when they are found to be too many.
            assert num_frames <= (1.5 * MAX_AHEAD if held else MAX_AHEAD)
        answer = GenerateRequest("demo", prompt="What can you do?")
        records = [record async for record in client.ask(bus, answer, client.new_request_id())]
        assert isinstance(records[-1], Finish)
        refused = await until(partial(is_refused, bus))
        assert refused.error.field == "outputs"
        assert (
            f"the limit is {MAX_WAIT_S:g} s (models.demo.stages.code2wav" in refused.error.message
        )
        # A request for codes alone needs no vocoder.
        codes_alone = GenerateRequest("demo", given_text="A", outputs=["codes"])
        assert isinstance([r async for r in client.ask(bus, codes_alone, "alone")][-1], Finish)
    for (text, voice), speech in zip(spoken, await asyncio.gather(*speeches), strict=True):
        check_speech(processes.folder, talker, text, speech, voice)
    await until_nothing_is_left(bus)


async def are_held(bus: Bus, number: int) -> bool:
    # A talker that an earlier test has killed may have left its last heartbeat.
    loads = [beat.load for beat in await bus.heartbeats.read() if beat.stage == "talker"]
    return any(
        load.get("opening") == number and load["held"] == load["running"] == load["waiting"] == 0
        for load in loads
    )


async def num_codes(bus: Bus, request_id: str) -> int:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, "codes"))
    records = [decode_record(message.data) for message in stored]
    return sum(len(record.frames) for record in records if isinstance(record, CodeChunk))


async def is_refused(bus: Bus) -> Failure | None:
    """Ask for a speech; return its refusal, or None and cancel it if it is admitted."""
    request_id = client.new_request_id()
    async for record in client.ask(bus, given("A", timeout_s=2.0), request_id):
        assert isinstance(record, Failure)
        return record if record.error.code == "overloaded" else None
    return None


async def test_a_speech_that_is_cancelled_leaves_nothing(bus: Bus) -> None:
    speaking = asyncio.create_task(speak(bus, given(TEXTS[0]), "cancelled"))
    await until(partial(has, bus, "cancelled", "codes", 2))
    await client.cancel(bus, "cancelled")
    spoken = await speaking
    final = spoken.records[-1]
    assert isinstance(final, Failure)
    assert final.error.code == "cancelled"
    for end in (spoken.codes[-1], spoken.audio[-1]):
        assert isinstance(end, OutputEnd)
        assert end.cut
    await until_nothing_is_left(bus)


async def failure(bus: Bus, request: GenerateRequest) -> Failure:
    records = [record async for record in client.ask(bus, request, client.new_request_id())]
    assert isinstance(records[-1], Failure)
    return records[-1]


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (given("A red star. " * 60), "given_text", "stage talker speaks at most 195 at one time"),
        (given("A", voice="nobody"), "voice", "available: alloy, echo"),
        (GenerateRequest("demo", given_text="A", outputs=["text"]), "outputs[0]", "codes, audio"),
        (given("A", prompt="B"), "prompt", "cannot be combined with given_text"),
        (
            GenerateRequest(
                "demo", prompt="B", sampling_params=SamplingParams(n=2), outputs=["audio"]
            ),
            "sampling_params.n",
            "the limit is 1",
        ),
        (GenerateRequest("demo", prompt="B", voice="alloy"), "voice", "none for these outputs"),
    ],
)
async def test_what_cannot_be_spoken_is_refused_with_the_field_and_the_limit(
    bus: Bus, request_: GenerateRequest, field: str, message: str
) -> None:
    error = (await failure(bus, request_)).error
    assert error.field == field
    assert message in error.message
    assert error.fault == "client"


# -- over HTTP, and from the command line ---------------------------------------------------------


async def test_the_official_client_speaks(
    processes: Processes, api: AsyncOpenAI, talker: PlainTalker
) -> None:
    text = TEXTS[1]
    right = sound_of(processes.folder, talker.speak(text, MAX_CODES, "echo")[0])
    form: Any = {"model": "demo", "input": text, "voice": "echo"}
    speaking = api.audio.speech.with_streaming_response
    async with speaking.create(**form, response_format="pcm") as response:
        pieces = [piece async for piece in response.iter_bytes()]
        assert response.headers["content-type"] == "audio/pcm"
        assert response.headers["pagemill-request-id"].startswith("speech-")
    assert b"".join(pieces) == right
    assert len(pieces) > 2, "the bytes come as they are made"
    whole = await api.audio.speech.create(**form, response_format="wav")
    with wave.open(io.BytesIO(whole.content)) as sound:
        assert sound.getparams()[:3] == (1, 2, 24_000)
        assert sound.readframes(len(right)) == right


@pytest.mark.parametrize(
    ("changed", "field", "status"),
    [
        ({"voice": "nobody"}, "voice", 400),
        ({"response_format": "mp3"}, "response_format", 400),
        ({"stream_format": "events"}, "stream_format", 400),
        ({"model": "mute"}, "model", 400),
        ({"model": "none"}, "model", 404),
        ({"speed": 1.5}, "speed", 400),
        ({"input": ""}, "input", 400),
        ({"input": "A red star. " * 60}, "input", 400),
    ],
)
async def test_what_the_endpoint_cannot_speak_is_refused_by_the_field(
    api: AsyncOpenAI, changed: dict[str, Any], field: str, status: int
) -> None:
    form: Any = {"model": "demo", "input": "A", "voice": "alloy", "response_format": "wav"}
    with pytest.raises(openai.APIStatusError) as refused:
        await api.audio.speech.create(**form | changed)
    assert refused.value.status_code == status
    assert refused.value.param == field


async def test_a_client_that_leaves_cancels_its_speech(bus: Bus, url: str) -> None:
    body = {"model": "demo", "input": TEXTS[0]}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
        http.stream("POST", f"{url}/v1/audio/speech", json=body) as response,
    ):
        request_id = response.headers["pagemill-request-id"]
        await anext(response.aiter_raw())

    final = await until(partial(last_record, bus, request_id))
    assert isinstance(final, Failure)
    assert final.error.code == "cancelled"
    await until_nothing_is_left(bus)


async def test_the_voices_are_listed(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        listing = (await http.get(f"{url}/v1/audio/voices")).json()
    assert [(voice["id"], voice["model"]) for voice in listing["data"]] == [
        ("alloy", "demo"),
        ("echo", "demo"),
    ]


async def test_the_command_line_saves_what_is_said(
    processes: Processes, bus: Bus, talker: PlainTalker, tmp_path: Path
) -> None:
    options = ["--config", str(processes.folder / "pagemill.yaml"), "--nats", processes.url]
    file = tmp_path / "out.wav"
    done = await asyncio.to_thread(preloaded.run, "say", TEXTS[0], "-o", str(file), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    codes, _ = talker.speak(TEXTS[0], MAX_CODES)
    assert read_wav(file) == sound_of(processes.folder, codes)
    assert f"{len(codes) / 50:.1f} s of sound" in done.stderr
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    piped = await asyncio.to_thread(preloaded.run, "say", TEXTS[0], "-o", str(pipe), *options)
    assert piped.returncode == 0, piped.stderr
    assert os.read(reader, 2**16)[44:] == sound_of(processes.folder, codes)
    os.close(reader)
    answer = await asyncio.to_thread(
        preloaded.run, "ask", "What can you do?", "--speak", "-o", str(file), *options
    )
    assert answer.returncode == 0, answer.stderr
    codes, _ = talker.speak(answer.stdout.removesuffix("\n"), MAX_CODES)
    assert read_wav(file) == sound_of(processes.folder, codes)
    missing = file.parent / "missing" / "a.wav"
    lost = await asyncio.to_thread(preloaded.run, "say", "A", "-o", str(missing), *options)
    assert lost.returncode == 1
    assert "No such file or directory" in " ".join(lost.stderr.split())
    assert "request req-" not in lost.stderr, "the file is checked before the request is sent"
    refused = await asyncio.to_thread(preloaded.run, "say", "A", "--model", "mute", *options)
    assert refused.returncode == 1
    assert "mute has no output of sound" in refused.stderr


def read_wav(file: Path) -> bytes:
    with wave.open(str(file)) as sound:
        assert sound.getparams()[:3] == (1, 2, 24_000)
        data: bytes = sound.readframes(sound.getnframes())
        return data


def test_defaults_of_a_stage_are_checked(tmp_path: Path) -> None:
    config = tmp_path / "pagemill.yaml"
    config.write_text(CONFIG.replace(f"max_tokens: {MAX_CODES}", "max_tokenz: 3"))
    with pytest.raises(ConfigError, match=r"talker\.sampling_defaults\.max_tokenz: unknown"):
        settings.load_config(config)


async def test_the_sounds_of_a_batch_are_stored_with_its_results(
    processes: Processes, api: AsyncOpenAI, bus: Bus
) -> None:
    path, texts = "/v1/audio/speech", ["One", "Two", "Three"]
    bodies = [{"model": "demo", "input": text, "voice": "echo"} for text in texts]
    bodies += [bodies[0] | {"response_format": "pcm"}, bodies[0] | {"voice": "nobody"}]
    batch = await ended(api, (await begin(api, lines_of(path, bodies), endpoint=path)).id)
    assert batch.status == "completed"
    results = await results_of(api, batch.output_file_id)
    assert results.keys() == {f"line-{number}" for number in range(4)}
    for number, body in enumerate(bodies[:4]):
        file = results[f"line-{number}"]["response"]["body"]
        direct = await api.audio.speech.create(**body)  # type: ignore[arg-type]
        assert (await api.files.content(file["id"])).content == direct.content
        ending = body.get("response_format", "wav")
        assert file["filename"] == f"{batch.id}_{number + 1}.{ending}"
        stored = await api.files.retrieve(file["id"])
        assert (stored.bytes, stored.purpose) == (len(direct.content), "batch_output")
        assert stored.expires_at is not None
        assert stored.expires_at > batch.created_at + 2_500_000
    errors = await results_of(api, batch.error_file_id)
    assert errors["line-4"]["response"]["body"]["error"]["param"] == "voice"
    # The chunks of the upload were moved, and are stored once.
    assert await bus.read(subjects.MEDIA_STREAM, subjects.media_chunks("*")) == []


async def test_a_line_whose_sound_would_be_streamed_is_refused(api: AsyncOpenAI) -> None:
    path = "/v1/audio/speech"
    body = {"model": "demo", "input": "One", "stream_format": "sse"}
    batch = await ended(api, (await begin(api, lines_of(path, [body]), endpoint=path)).id)
    assert batch.errors is not None
    assert [error.param for error in batch.errors.data or []] == ["body.stream_format"]
