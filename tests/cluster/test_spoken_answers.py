"""Spoken answers over HTTP, read by OpenAI's official client, by real processes."""

import base64
import io
import wave
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from shared.bus.bus import Bus
from tests import talkers
from tests.cluster import test_speech
from tests.cluster.processes import Processes, running, sound_of, until_nothing_is_left, until_ready
from tests.cluster.test_speech import CONFIG, MAX_CODES, WORKERS
from tests.generator import voices
from tests.talkers import PlainTalker

QUESTION: Any = [{"role": "user", "content": "What can you do?"}]
SPOKEN: dict[str, Any] = {
    "model": "demo",
    "messages": QUESTION,
    "modalities": ["text", "audio"],
    "audio": {"voice": "echo", "format": "wav"},
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("spoken")
    (folder / "pagemill.yaml").write_text(CONFIG)
    voices.write(folder / "voice")
    talkers.write(folder / "talker")
    with running(folder, WORKERS, test_speech.__name__) as started:
        yield started


@pytest.fixture
async def bus(processes: Processes) -> AsyncIterator[Bus]:
    connected = await Bus.connect(processes.url, "test")
    await until_ready(connected, WORKERS)
    yield connected
    await connected.close()


@pytest.fixture(scope="module")
def talker(processes: Processes) -> PlainTalker:
    return PlainTalker(processes.folder / "talker")


@pytest.fixture
async def url(bus: Bus) -> str:
    found = [beat.url for beat in await bus.read_heartbeats() if beat.role == "gateway"]
    assert found[0] is not None
    return found[0]


@pytest.fixture
async def api(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


# -- chat completions -----------------------------------------------------------------------------


async def test_a_whole_answer_is_spoken(
    processes: Processes, bus: Bus, api: AsyncOpenAI, talker: PlainTalker
) -> None:
    answer = await api.chat.completions.create(**SPOKEN)
    (choice,) = answer.choices
    audio, usage = choice.message.audio, answer.usage
    assert audio is not None
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert audio.transcript == choice.message.content
    assert audio.expires_at == answer.created + 3600
    codes, _ = talker.speak(audio.transcript, MAX_CODES, "echo")
    with wave.open(io.BytesIO(base64.b64decode(audio.data))) as sound:
        assert sound.getparams()[:3] == (1, 2, 24_000)
        assert sound.readframes(sound.getnframes()) == sound_of(processes.folder, codes)
    assert usage.completion_tokens_details.audio_tokens == len(codes)
    text_tokens = usage.completion_tokens_details.text_tokens
    assert text_tokens
    assert usage.completion_tokens == text_tokens + len(codes)
    assert choice.finish_reason == "length"
    # The answer may be sent back.
    messages: Any = [*QUESTION, choice.message, *QUESTION]
    again = await api.chat.completions.create(**SPOKEN | {"messages": messages})
    assert again.choices[0].message.audio is not None
    await until_nothing_is_left(bus)


async def test_a_streamed_answer_is_spoken_as_it_is_made(
    processes: Processes, api: AsyncOpenAI, talker: PlainTalker
) -> None:
    form: Any = SPOKEN | {"audio": {"voice": "alloy", "format": "pcm16"}}
    stream = await api.chat.completions.create(
        **form, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last, usage = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    text = "".join(delta.content or "" for delta in deltas)
    audio = [delta.audio for delta in deltas if delta.audio is not None]
    assert "".join(piece.transcript or "" for piece in audio) == text
    sound = [base64.b64decode(piece.data) for piece in audio if piece.data]
    codes, _ = talker.speak(text, MAX_CODES)
    assert b"".join(sound) == sound_of(processes.folder, codes)
    assert len(sound) > 2
    assert last.choices[0].finish_reason is not None
    assert last.choices[0].delta.audio is not None
    assert last.choices[0].delta.audio.expires_at
    assert usage.usage is not None
    assert usage.usage.completion_tokens_details is not None
    assert usage.usage.completion_tokens_details.audio_tokens == len(codes)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"audio": {"voice": "nobody", "format": "wav"}}, "audio.voice"),
        ({"audio": {"voice": "alloy", "format": "mp3"}}, "audio.format"),
        ({"audio": {"voice": "alloy", "format": "wav"}, "stream": True}, "audio.format"),
        ({"audio": None}, "audio"),
        ({"modalities": ["text"]}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["text", "smell"]}, "modalities[1]"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "paint"}}]}, "tools"),
        ({"model": "mute"}, "modalities"),
    ],
)
async def test_what_cannot_be_spoken_is_refused_by_the_field(
    api: AsyncOpenAI, changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.chat.completions.create(**SPOKEN | changed)
    assert refused.value.param == field
