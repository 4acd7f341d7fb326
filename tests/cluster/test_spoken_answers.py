"""Spoken answers over HTTP, read by OpenAI's official client, by real processes."""

import asyncio
import base64
import io
import json
import os
import re
import sys
import wave
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from ops.browser import ENTER, MISSING, browsing
from shared.bus.bus import Bus
from tests import preloaded, talkers
from tests.cluster import test_speech
from tests.cluster.conftest import gateway_url
from tests.cluster.processes import Processes, running, sound_of, until_nothing_is_left
from tests.cluster.test_speech import CONFIG, MAX_CODES, ROOT, TEXTS, WORKERS, read_wav
from tests.generator import voices
from tests.support.waiting import until
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


@pytest.fixture(scope="module")
def talker(processes: Processes) -> PlainTalker:
    return PlainTalker(processes.folder / "talker")


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
    # The transcript is what has been spoken by the end of the samples, and the rest at the end.
    # It is an estimate: within a record of the text all tokens count as equally long.
    longest_word = max(map(len, text.split()))
    num_samples, transcript = 0, ""
    for piece in audio[:-1]:
        assert piece.data
        num_samples += len(base64.b64decode(piece.data)) // 2
        transcript += piece.transcript or ""
        assert len(transcript) <= num_samples / voices.SAMPLES_PER_FRAME / 1.2 + longest_word
    assert sum(bool(piece.transcript) for piece in audio) > 2
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
        ({"modalities": ["text", "image"]}, "modalities"),
        ({"modalities": ["text", "smell"]}, "modalities[1]"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "paint"}}]}, "tools"),
        ({"model": "mute"}, "modalities"),
        ({"modalities": ["text"], "audio": None, "extra_body": {"on_late": "text"}}, "on_late"),
    ],
)
async def test_what_cannot_be_spoken_is_refused_by_the_field(
    api: AsyncOpenAI, changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.chat.completions.create(**SPOKEN | changed)
    assert refused.value.param == field


# -- answers with a speech that is late or fails --------------------------------------------------

ON_LATE: Any = {"on_late": "text", "timeout_s": 3.0}


async def test_a_speech_that_is_late_leaves_the_text(
    processes: Processes, bus: Bus, api: AsyncOpenAI, tmp_path: Path
) -> None:
    streamed: Any = SPOKEN | {"audio": {"voice": "alloy", "format": "pcm16"}, "stream": True}
    with processes.stopped("code2wav"):
        options = ["--config", str(processes.folder / "pagemill.yaml"), "--nats", processes.url]
        saving = ["--speak", "-o", str(tmp_path / "out.wav"), "--on-late", "text"]
        ask = ["ask", "What can you do?", *saving, "--timeout", "3"]
        answer, stream, failed, done = await asyncio.gather(
            api.chat.completions.create(**SPOKEN, extra_body=ON_LATE),
            api.chat.completions.create(**streamed, extra_body=ON_LATE),
            refusal(api, extra_body={"timeout_s": 3.0}),
            asyncio.to_thread(preloaded.run, *ask, *options),
        )
        *_, last = [chunk async for chunk in stream]
    assert failed.code == "deadline_exceeded"
    (choice,) = answer.choices
    text = choice.message.content
    assert text
    assert choice.message.audio is not None
    assert choice.message.audio.transcript == text
    assert base64.b64decode(choice.message.audio.data)[44:] == b""
    for audio in (choice.message.audio, last.choices[0].delta.audio):
        error: Any = getattr(audio, "error", None)
        assert error["code"] == "deadline_exceeded"
    assert last.choices[0].finish_reason == choice.finish_reason
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{text}\n"
    assert done.stderr.count("the speech is cut: not finished within 3 s") == 1
    await until_nothing_is_left(bus)


async def refusal(api: AsyncOpenAI, **changed: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        await api.chat.completions.create(**SPOKEN | changed)
    return refused.value


@pytest.mark.long
async def test_a_text_that_is_too_long_to_speak_is_answered_in_text(
    bus: Bus, api: AsyncOpenAI
) -> None:
    long: Any = {"max_tokens": 300, "extra_body": {"ignore_eos": True, "on_late": "text"}}
    answer = await api.chat.completions.create(**SPOKEN | long)
    (choice,) = answer.choices
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 300
    error: Any = getattr(choice.message.audio, "error", None)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "modalities")
    refused = await refusal(api, max_tokens=300, extra_body={"ignore_eos": True})
    assert refused.param == "modalities"
    await until_nothing_is_left(bus)


# -- speeches that are read again -----------------------------------------------------------------


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        yield client


SPEECH = {"model": "demo", "input": TEXTS[0], "voice": "alloy"}
PATH = "/v1/audio/speech"


async def test_a_speech_comes_as_events(
    processes: Processes, api: AsyncOpenAI, http: httpx.AsyncClient, talker: PlainTalker
) -> None:
    form: Any = SPEECH | {"response_format": "pcm", "stream_format": "sse"}
    async with api.audio.speech.with_streaming_response.create(**form) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        request_id = response.headers["x-request-id"]
        lines = [line async for line in response.iter_lines()]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    *deltas, done = map(json.loads, events)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    codes, _ = talker.speak(TEXTS[0], MAX_CODES)
    sound = sound_of(processes.folder, codes)
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == sound
    usage = done["usage"]
    assert done["type"] == "speech.audio.done"
    assert usage["output_tokens"] == len(codes)
    assert usage["total_tokens"] == usage["input_tokens"] + len(codes) > len(codes)
    state = (await http.get(f"/v1/requests/{request_id}")).json()
    assert state["state"] == "finished"
    assert state["result"]["usage"] == usage
    assert (await http.get(state["result"]["url"])).content == sound


async def test_a_speech_is_read_again_in_parts(
    processes: Processes, http: httpx.AsyncClient, talker: PlainTalker
) -> None:
    whole = await http.post(PATH, json=SPEECH)
    url = f"{PATH}/{whole.headers['pagemill-request-id']}"
    sound, size = whole.content, len(whole.content)
    codes, _ = talker.speak(TEXTS[0], MAX_CODES)
    assert sound[44:] == sound_of(processes.folder, codes)
    again = await http.get(url)
    assert again.status_code == 200
    assert again.content == sound
    assert again.headers["content-length"] == str(size)
    for byte_range, first, last in (
        ("bytes=0-", 0, size),
        ("bytes=44-", 44, size),
        ("bytes=10-1044", 10, 1045),
        ("bytes=-100", size - 100, size),
        (f"bytes=5001-{10 * size}", 5001, size),
    ):
        part = await http.get(url, headers={"range": byte_range, "if-range": again.headers["etag"]})
        assert part.status_code == 206
        assert part.headers["content-range"] == f"bytes {first}-{last - 1}/{size}"
        assert part.content == sound[first:last]
    behind = await http.get(url, headers={"range": f"bytes={size}-"})
    assert behind.status_code == 416
    assert behind.headers["content-range"] == f"bytes */{size}"
    assert behind.json()["error"]["code"] == "range_not_satisfiable"
    for ignored in ({"range": "bytes=0-1,5-6"}, {"range": "bytes=5-", "if-range": '"other"'}):
        assert (await http.get(url, headers=ignored)).content == sound
    missing = await http.get(f"{PATH}/speech-0")
    assert missing.status_code == 404


async def test_another_gateway_continues_a_speech_at_the_next_byte(
    processes: Processes, bus: Bus, talker: PlainTalker
) -> None:
    """The gateway is killed in the middle of a speech, and of a chat that is spoken."""
    text = next(text for text in TEXTS if len(talker.speak(text, MAX_CODES)[0]) > 40)
    form = SPEECH | {"input": text, "response_format": "pcm"}
    chat = SPOKEN | {"audio": {"voice": "alloy", "format": "pcm16"}, "stream": True}
    events: list[str] = []
    first = await gateway_url(bus)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        async with (
            http.stream("POST", first + PATH, json=form) as spoken,
            http.stream(
                "POST",
                f"{first}/v1/chat/completions",
                json=chat,
                headers={"accept": "text/event-stream"},
            ) as answered,
        ):
            lines, pieces = answered.aiter_lines(), spoken.aiter_raw()
            request_id, chat_id = (r.headers["x-request-id"] for r in (spoken, answered))
            sound = await anext(pieces)
            while '"data"' not in (events[-1] if events else ""):
                events.append(await anext(lines))
            processes.kill("gateway")
            # The sound that was sent before the gateway died.
            sound += b"".join([piece async for piece in until_broken(pieces)])
            events += [line async for line in until_broken(lines)]
        second = await until(partial(another_gateway, bus, first))
        ranged = {"range": f"bytes={len(sound)}-"}
        rest = await http.get(f"{second}{PATH}/{request_id}", headers=ranged)
        last_id = [line for line in events if line.startswith("id: ")][-1].removeprefix("id: ")
        resumed = await http.get(
            f"{second}/v1/requests/{chat_id}/stream", headers={"last-event-id": last_id}
        )
        whole = await http.get(f"{second}{PATH}/{chat_id}")
    assert rest.status_code == 206
    assert sound + rest.content == sound_of(processes.folder, talker.speak(text, MAX_CODES)[0])
    chunks = [json.loads(line.removeprefix("data: ")) for line in whole_events(events)]
    chunks += [json.loads(line[6:]) for line in resumed.text.splitlines() if line[:7] == "data: {"]
    audio = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in chunks]
    assert b"".join(base64.b64decode(piece.get("data", "")) for piece in audio) == whole.content
    answer = "".join(piece.get("transcript", "") for piece in audio)
    assert whole.content == sound_of(processes.folder, talker.speak(answer, MAX_CODES)[0])
    await until_nothing_is_left(bus)


async def until_broken(received: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for piece in received:
            yield piece
    except httpx.HTTPError:
        return
    pytest.fail("the response was complete")


def whole_events(lines: list[str]) -> list[str]:
    """Return the data of the events that have been read to their end."""
    ends = [number for number, line in enumerate(lines) if not line]
    return [line for line in lines[: ends[-1]] if line.startswith("data: ")]


async def another_gateway(bus: Bus, killed: str) -> str | None:
    beats = await bus.heartbeats.read()
    return next((b.url for b in beats if b.role == "gateway" and b.url and b.url != killed), None)


async def test_a_client_with_nats_alone_reads_the_sound(
    processes: Processes, bus: Bus, talker: PlainTalker, tmp_path: Path
) -> None:
    async def example(text: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "ops" / "examples" / "speak.py"),
            text,
            str(file),
            env=os.environ | {"NATS_URL": processes.url, "NATS_NKEY": ""},
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        return process.returncode, errors.decode()

    file = tmp_path / "out.wav"
    assert await example(TEXTS[1]) == (0, "")
    codes, _ = talker.speak(TEXTS[1], MAX_CODES)
    assert read_wav(file) == sound_of(processes.folder, codes)
    code, errors = await example("A red star. " * 60)
    assert code == 1
    assert "speaks at most 195" in errors


async def test_speeches_are_measured(processes: Processes, http: httpx.AsyncClient) -> None:
    (await http.post(PATH, json=SPEECH)).raise_for_status()
    metrics = await asyncio.to_thread(preloaded.run, "metrics", "--nats", processes.url)
    for name, role in (
        ("http_time_to_first_audio_seconds", "gateway"),
        ("time_to_first_audio_seconds", "generator"),
        ("audio_realtime_factor", "generator"),
    ):
        counts = re.findall(rf'pagemill_{name}_count{{.*role="{role}".*}} (\d+)', metrics.stdout)
        assert any(int(count) for count in counts), name
    assert re.search(r"pagemill_audio_gap_seconds_total{", metrics.stdout)


# -- the web page ---------------------------------------------------------------------------------

# Keeps the samples that are to be played, with the time at which they are.
RECORD = """
window.played = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (when) {
  const samples = [...this.buffer.getChannelData(0)].map((sample) => sample * 32768);
  played.push([when, this.buffer.sampleRate, samples]);
  return start.call(this, when);
};
"""


@pytest.mark.skipif(
    MISSING is not None, reason="needs Debian's packages chromium and chromium-driver"
)
@pytest.mark.timeout(180)
def test_the_page_plays_a_speech_as_it_arrives(
    processes: Processes, url: str, talker: PlainTalker, tmp_path: Path
) -> None:
    with browsing(tmp_path) as page:
        page.open(f"{url}/")
        page.wait("!document.querySelector('#send').disabled")
        page.wait("!document.querySelector('#speech').hidden")
        page.run(RECORD)
        page.run("document.querySelector('#speak').click()")
        page.type("#question", "What can you do?" + ENTER)
        page.wait("document.querySelector('#send').disabled === false", timeout_s=60)
        answer = page.run("return document.querySelector('.turn .text').textContent")
        played = page.run("return played")
        assert page.text(".turn .status").startswith("Done")
        length = page.run("return document.querySelector('.turn dd.speech').textContent")
        assert page.console_errors() == []
    codes, _ = talker.speak(answer, MAX_CODES)
    samples = np.frombuffer(sound_of(processes.folder, codes), "<i2")
    assert np.array_equal(np.concatenate([piece for _, _, piece in played]), samples)
    assert {rate for _, rate, _ in played} == {24_000}
    for (when, rate, piece), (after, _, _) in pairwise(played):
        assert after >= when + len(piece) / rate - 1e-6
    assert len(played) > 2
    assert length == f"{len(samples) / 24_000:.1f} s"
