"""Plans and events of `/v1/audio/speech`, and of `/generate`."""

import base64
from pathlib import Path

import msgspec
import pytest

from shared.config.parsing import parse_config
from shared.errors import InvalidRequest
from shared.protocol.pipeline import Pipeline
from shared.protocol.records import (
    AudioChunk,
    ChoiceDelta,
    Finish,
    OutputSummary,
    TokenChunk,
    Usage,
)
from shared.stage.pipelines import pipelines_of
from workers.gateway.core.assembler import Answering
from workers.gateway.core.plan import Delivery
from workers.gateway.openai.demo import DemoAssembler, plan_demo
from workers.gateway.openai.speech import SSE, SpeechAssembler, plan_speech
from workers.gateway.schemas.demo import DemoRequest
from workers.gateway.schemas.speech import SpeechDelta, SpeechDone, SpeechRequest, SpeechUsage

VOICE = Path(__file__).parents[3] / "ops" / "demo_voice" / "pagemill.yaml"
SPEECH = SpeechRequest(model="demo", input="one", voice="alloy")
PCM = base64.b64encode(b"\1\0\2\0").decode()


@pytest.fixture(scope="module")
def spoken() -> Pipeline:
    return pipelines_of(parse_config(VOICE.read_text(), {}, VOICE.name))["demo"]


def test_a_plan_asks_for_the_sound_of_the_given_text(spoken: Pipeline) -> None:
    plan = plan_speech(SPEECH, spoken, 60.0)
    (request,) = plan.requests
    assert (request.given_text, request.voice, request.outputs) == ("one", "alloy", ["audio"])
    assert plan.delivery == Delivery.SOUND
    events = plan_speech(msgspec.structs.replace(SPEECH, stream_format=SSE), spoken, 60.0)
    assert events.delivery == Delivery.EVENTS


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"voice": "nobody"}, "voice"),
        ({"response_format": "mp3"}, "response_format"),
        ({"stream_format": "lines"}, "stream_format"),
    ],
)
def test_a_choice_that_there_is_not_is_refused(
    spoken: Pipeline, change: dict[str, str], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan_speech(msgspec.structs.replace(SPEECH, **change), spoken, 60.0)
    assert refused.value.field == field


def test_a_model_without_a_voice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="demo does not speak"):
        plan_speech(SPEECH, Pipeline((), ()), 60.0)


@pytest.mark.parametrize("sound_format", ["wav", "pcm"])
def test_events_are_the_file_and_then_the_usage(spoken: Pipeline, sound_format: str) -> None:
    body = msgspec.structs.replace(SPEECH, response_format=sound_format, stream_format=SSE)
    plan = plan_speech(body, spoken, 60.0)
    assembler = SpeechAssembler(Answering("speech-1", "demo", 7, plan.options))
    chunks = [AudioChunk(n, 1, 2 * n, 2, 24_000, PCM) for n in range(2)]
    deltas = [event for chunk in chunks for event in assembler.add(1, chunk)]
    assert all(isinstance(delta, SpeechDelta) for delta in deltas)
    sound = b"".join(base64.b64decode(delta.audio) for delta in deltas)
    assert sound.startswith(b"RIFF") == (sound_format == "wav")
    assert sound.endswith(b"\1\0\2\0" * 2)
    outputs = {"audio": OutputSummary(Usage(3, 0), units={"frames": 5})}
    (done,) = assembler.add(0, Finish(0, 1, Usage(0, 0), 0, [], outputs))
    assert done == SpeechDone(SpeechUsage(3, 5, 8))
    assert assembler.answer().usage == done.usage


def test_the_demo_server_repeats_the_prompt_before_each_answer() -> None:
    plan = plan_demo(msgspec.convert({"model": "demo", "prompt": "Say ", "n": 2}, DemoRequest), 1)
    assert [request.prompt for request in plan.requests] == ["Say "]
    assembler = DemoAssembler(Answering("", "demo", 7, plan.options))
    (first,) = assembler.add(0, TokenChunk(0, 1, [ChoiceDelta(1, 0, [5], "so")]))
    assert first.text == ["Say ", "Say so"]
    assembler.add(0, TokenChunk(1, 1, [ChoiceDelta(0, 0, [5], "no"), ChoiceDelta(1, 1, [6], ".")]))
    assert assembler.answer().text == ["Say no", "Say so."]
    assert assembler.add(0, Finish(2, 1, Usage(0, 0), 0, [])) == []
