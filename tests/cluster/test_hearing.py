"""Questions about sounds and transcripts, by the demo's model that hears, over HTTP and NATS.

Its answers equal the answers of transformers for the same samples, right or wrong.
"""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from openai import APIStatusError, AsyncOpenAI

from ops.browser import ENTER, MISSING, browsing
from ops.training.audio import Wave
from ops.training.hearing.judging import Listener
from ops.training.hearing.sounds import RATE, beeps
from shared.bus.bus import Bus
from shared.client import pin_media
from shared.codec.arrays import from_numpy
from shared.config.schema import ModelConfig
from shared.models.frames import resize_frame
from shared.models.media import DecodedVideo, Frame, FramePlan, VideoProbe
from shared.models.qwen_video import SECONDS
from shared.protocol.records import Failure, Finish
from shared.protocol.requests import AudioPart, AudioURL, Feature, GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from tests import preloaded
from tests.cluster.conftest import Cluster, answer, start_cluster, stop_cluster
from tests.cluster.streams import tokens_of
from tests.gateway.batches.conftest import begin, ended, lines_of, results_of
from tests.sounds import file_of
from workers.renderer.media.splitter import split_sound
from workers.renderer.processing.processor import Processor

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "ops" / "demo_hearing"
# The configuration that ships with the model, and what tests need: videos, encoders, short waits.
SHIPPED = (MODEL / "pagemill.yaml").read_text().replace("max_videos: 0", "max_videos: 2")
CONFIG = f"""{SHIPPED.replace("path: .", f"path: {MODEL}")}
    tower: encoder
delivery: {{ack_wait_s: 2.0, drain_s: 10.0}}
"""
QUESTION = "What do you hear?"
VIDEO_TOKEN = 767
FIFTH = "messages[0].content[4].audio_url.url"


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("hearing"), CONFIG)
    yield running
    assert stop_cluster(running) == 0


@pytest.fixture
async def api(hearing: Cluster) -> AsyncIterator[AsyncOpenAI]:
    bus = await Bus.connect(hearing.url, "test")
    beats = await bus.heartbeats.read()
    await bus.close()
    (url,) = (beat.url for beat in beats if beat.role == "gateway" and beat.url)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener(MODEL)


def sound(number: int = 3) -> Wave:
    return beeps(np.random.default_rng(number), number, high=True)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def ask(api: AsyncOpenAI, *parts: dict[str, Any]) -> str | None:
    content: Any = [*parts, {"type": "text", "text": QUESTION}]
    answer = await api.chat.completions.create(
        model="hearing", messages=[{"role": "user", "content": content}]
    )
    return answer.choices[0].message.content


async def test_a_sound_is_heard_as_transformers_hears_it(
    api: AsyncOpenAI, listener: Listener
) -> None:
    data = file_of(sound())
    reply = listener.listen(sound(), QUESTION)
    # The format is the file's, not what the client says.
    part = {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "mp3"}}
    assert await ask(api, part) == reply
    url = "data:audio/x-unknown;base64," + encoded(data)
    assert await ask(api, {"type": "audio_url", "audio_url": {"url": url}}) == reply


async def test_sounds_that_cannot_be_heard_are_refused(api: AsyncOpenAI) -> None:
    long = file_of(np.zeros(31 * RATE, np.float32), "FLAC", "PCM_16")
    cases = [
        (b"RIFF....WAVEnothing", "invalid_media", ""),
        (file_of(np.zeros(200, np.float32)), "invalid_media", "200 samples"),
        (long, "media_too_large", "is over this model's limit of 30 seconds"),
    ]
    for data, code, message in cases:
        part = {"type": "audio_url", "audio_url": {"url": "data:;base64," + encoded(data)}}
        with pytest.raises(APIStatusError) as caught:
            await ask(api, part)
        error: Any = caught.value.body
        assert (error["code"], error["param"]) == (code, "messages[0].content[0].audio_url.url")
        assert message in error["message"]
    # The error names the field that the client has sent.
    part = {"type": "input_audio", "input_audio": {"data": encoded(b"RIFF"), "format": "wav"}}
    with pytest.raises(APIStatusError) as caught:
        await ask(api, part)
    refused: Any = caught.value.body
    assert refused["param"] == "messages[0].content[0].input_audio.data"
    url = "data:;base64," + encoded(long)
    assert await ask(api, {"type": "audio_url", "audio_url": {"url": url, "overflow": "cut"}})


async def test_too_many_sounds_are_refused(api: AsyncOpenAI, hearing: Cluster) -> None:
    # None of them can be heard: they are counted before any is read.
    url = "data:audio/wav;base64,AAAA"
    expected = "audios in the request: 5, over the limit of 4 (max_audios)"
    parts: list[dict[str, Any]] = [{"type": "audio_url", "audio_url": {"url": url}}] * 5
    with pytest.raises(APIStatusError) as caught:
        await ask(api, *parts)
    refused: Any = caught.value.body
    assert (caught.value.status_code, refused["code"]) == (422, "media_too_large")
    assert (refused["param"], refused["message"]) == (FIFTH, expected)
    message = Message("user", [AudioPart(AudioURL(url))] * 5)
    bus = await Bus.connect(hearing.url, "test")
    [failure] = await answer(bus, GenerateRequest("hearing", [message]))
    await bus.close()
    assert isinstance(failure, Failure)
    assert (failure.error.code, failure.error.field) == ("media_too_large", FIFTH)
    assert failure.error.message == expected


def processed_video(seconds: float) -> tuple[int, bytes]:
    """A grey video as another server sends it, with the number of its tokens."""

    def read(plan: FramePlan) -> Iterator[Frame]:
        frame = np.full((56, 84, 3), 200, np.uint8)
        return (resize_frame(frame, plan) for _ in plan.indexes)

    processor = Processor(ModelConfig(str(MODEL), max_videos=2))
    video = DecodedVideo(VideoProbe(8, 2.0, 84, 56, is_sequence=True), read, "")
    item = processor.process(video, "field", "")
    fields = item.fields | {SECONDS: from_numpy(np.array(seconds, np.float32))}
    return item.num_tokens, processor.encode_item(replace(item, fields=fields))[0]


async def about_videos(bus: Bus, *seconds: float) -> GenerateRequest:
    token_ids = [5, 6, 7]
    features: list[Feature] = []
    for value in seconds:
        num_tokens, data = processed_video(value)
        reference = await pin_media(bus, data, "")
        name = f"{value:g} {len(features)}"
        features.append(Feature("video", name, len(token_ids), num_tokens, reference))
        token_ids += [VIDEO_TOKEN] * num_tokens + [8, 9]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return GenerateRequest(
        "hearing", sampling_params=sampling, prompt_token_ids=token_ids, features=features
    )


@pytest.mark.parametrize(
    ("seconds", "field", "message"),
    [
        ([1e6], "features.kwargs_data.video[0]", "reach position 75000000"),
        # The renderer knows each video alone, and the engine all of them.
        ([40.0, 40.0], "items", "reach position 60"),
    ],
)
async def test_videos_beyond_the_last_position_are_refused_and_others_are_answered(
    hearing: Cluster, seconds: list[float], field: str, message: str
) -> None:
    bus = await Bus.connect(hearing.url, "test")
    good, bad = await about_videos(bus, 1.0), await about_videos(bus, *seconds)
    alone = await answer(bus, good)
    answered, [*_, failure] = await asyncio.gather(answer(bus, good), answer(bus, bad))
    await bus.close()
    assert isinstance(failure, Failure)
    assert (failure.error.code, failure.error.field) == ("invalid_request", field)
    assert message in failure.error.message
    assert "positions end at 4095" in failure.error.message
    assert isinstance(answered[-1], Finish)
    assert tokens_of(answered) == tokens_of(alone)


async def test_a_response_is_about_a_sound(api: AsyncOpenAI, listener: Listener) -> None:
    # A sound that is too large for the log of the response is stored outside it.
    padded = np.concatenate([sound(), np.zeros(9 * RATE, np.float32)])
    small, large = file_of(sound()), file_of(padded)
    assert len(small) < 2**17 < 2**19 < len(large)
    flac = file_of(sound(), "FLAC", "PCM_24")
    stored = await api.files.create(file=("three.flac", flac), purpose="user_data")
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav"}}
        for data in (small, large)
    ]
    parts.append({"type": "input_file", "file_id": stored.id})
    stored_parts = []
    for part, samples in zip(parts, (sound(), padded, sound()), strict=True):
        content: Any = [part, {"type": "input_text", "text": QUESTION}]
        response = await api.responses.create(
            model="hearing", input=[{"role": "user", "content": content}]
        )
        assert response.output_text == listener.listen(samples, QUESTION)
        items: Any = await api.responses.input_items.list(response.id)
        stored_parts.append(items.data[0].content[0])
    assert stored_parts[0].input_audio["data"] == encoded(small)
    assert stored_parts[1].input_audio["data"].startswith("media:")
    assert stored_parts[2].filename == "three.flac"


async def test_a_recording_is_written_down(api: AsyncOpenAI, listener: Listener) -> None:
    transcribe: Any = api.audio.transcriptions.create
    data = file_of(sound())
    transcript = listener.listen(sound(), "Transcribe the speech into text.")
    answer = await transcribe(model="hearing", file=("a.wav", data))
    assert answer.text == transcript
    assert answer.usage.type == "tokens"
    text = await transcribe(model="hearing", file=("a.wav", data), response_format="text")
    assert text == f"{transcript}\n"
    for name in ("srt", "vtt", "verbose_json"):
        with pytest.raises(APIStatusError, match="the model does not produce timestamps") as caught:
            await transcribe(model="hearing", file=("a.wav", data), response_format=name)
        assert caught.value.status_code == 400
    with pytest.raises(APIStatusError, match="not a readable sound") as caught:
        await transcribe(model="hearing", file=("a.wav", b"no sound"))
    told_error: Any = caught.value.body
    assert told_error["param"] == "file"


async def test_stored_recordings_are_the_lines_of_a_batch(
    api: AsyncOpenAI, listener: Listener
) -> None:
    files = [
        await api.files.create(file=(f"{number}.wav", file_of(sound(number))), purpose="user_data")
        for number in (2, 3)
    ]
    bodies = [{"model": "hearing", "file": file.id} for file in files]
    bodies.append(bodies[0] | {"response_format": "text"})
    bodies.append({"model": "hearing", "file": f"file-{'0' * 64}"})
    bodies.append({"model": "hearing", "file": "https://example.com/a.wav"})
    path = "/v1/audio/transcriptions"
    direct: Any = await api.post(path.removeprefix("/v1"), cast_to=object, body=bodies[1])
    batch = await ended(api, (await begin(api, lines_of(path, bodies), endpoint=path)).id)
    results = await results_of(api, batch.output_file_id)
    two, three = (
        listener.listen(sound(number), "Transcribe the speech into text.") for number in (2, 3)
    )
    assert {name: line["response"]["body"] for name, line in results.items()} == {
        "line-0": results["line-0"]["response"]["body"] | {"text": two},
        "line-1": direct | {"text": three},
        "line-2": f"{two}\n",
    }
    assert batch.usage is not None
    assert batch.usage.input_tokens > direct["usage"]["input_tokens"]
    errors = await results_of(api, batch.error_file_id)
    refusals = {name: line["response"]["body"]["error"] for name, line in errors.items()}
    assert {name: (error["code"], error["param"]) for name, error in refusals.items()} == {
        "line-3": ("media_not_found", "file"),
        "line-4": ("invalid_request", "file"),
    }


async def test_a_long_recording_is_written_down_in_pieces(
    api: AsyncOpenAI, listener: Listener
) -> None:
    whole = np.zeros(70 * RATE, np.float32)
    for number, at_s in ((1, 10), (2, 35), (4, 60)):
        speech = sound(number)
        whole[at_s * RATE :][: len(speech)] = speech
    # The stored samples of a piece are rounded to 16 bits.
    rounded = np.asarray(np.rint(whole * 2**15).clip(max=2**15 - 1) / 2**15, np.float32)
    pieces = list(split_sound(iter([rounded])))
    assert len(pieces) == 3
    instruction = "Transcribe the English speech into text."
    transcript = " ".join(listener.listen(piece, instruction) for piece in pieces)
    file = ("long.flac", file_of(rounded, "FLAC", "PCM_16"))
    transcribe: Any = api.audio.transcriptions.create
    stream = await transcribe(model="hearing", file=file, language="en", stream=True)
    *deltas, done = [event async for event in stream]
    assert "".join(event.delta for event in deltas) == done.text == transcript


async def test_clients_without_http_ask_about_sounds(
    hearing: Cluster, listener: Listener, tmp_path: Path
) -> None:
    file = tmp_path / "a.flac"
    file.write_bytes(file_of(sound(), "FLAC", "PCM_16"))
    reply = listener.listen(soundfile.read(file, dtype="float32")[0], QUESTION)
    command = ("ask", f"{QUESTION} @{file}", "--nats", hearing.url)
    done = await asyncio.to_thread(preloaded.run, *command, "--config", str(hearing.config))
    assert done.stdout.strip() == reply
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "ops" / "examples" / "hear.py"),
        QUESTION,
        str(file),
        env=os.environ | {"NATS_URL": hearing.url, "NATS_NKEY": str(hearing.client_key)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert output.decode().strip() == reply


@pytest.mark.skipif(
    MISSING is not None, reason="needs Debian's packages chromium and chromium-driver"
)
@pytest.mark.timeout(180)
def test_the_page_plays_what_it_sends(api: AsyncOpenAI, listener: Listener, tmp_path: Path) -> None:
    file = tmp_path / "three.bin"
    file.write_bytes(file_of(sound(), "FLAC", "PCM_16"))
    reply = listener.listen(soundfile.read(file, dtype="float32")[0], QUESTION)
    with browsing(tmp_path) as page:
        page.open(str(api.base_url).removesuffix("v1/"))
        page.wait("!document.querySelector('#send').disabled")
        page.type("#file", str(file))
        # The browser has decoded as much of the sound as it needs to play it.
        page.wait("document.querySelector('#images audio')?.readyState >= 3")
        page.type("#question", QUESTION + ENTER)
        page.wait("document.querySelector('.turn .status')?.textContent.startsWith('Done')")
        assert page.text(".turn .text").strip() == reply
        duration_s = page.run("return document.querySelector('.thumbs audio').duration")
        assert duration_s == pytest.approx(len(sound()) / RATE, abs=0.01)
        assert page.console_errors() == []
