"""`/v1/audio/speech`: the plan of a request, and the assembler of its events. Pure."""

import base64
from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidRequest
from shared.protocol.pipeline import AUDIO, Pipeline
from shared.protocol.records import AnyRecord, AudioChunk, Finish, OutputSummary
from shared.protocol.requests import GenerateRequest
from workers.gateway.core.assembler import Answering, AnswerOptions, Assembler
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.order import in_speech_order
from workers.gateway.core.plan import Delivery, SubmitPlan, check_choice
from workers.gateway.core.sound_formats import MEDIA_TYPES, WAV, wav_header
from workers.gateway.openai.chat import AudioOptions
from workers.gateway.schemas.speech import (
    SpeechDelta,
    SpeechDone,
    SpeechRequest,
    SpeechResult,
    SpeechUsage,
)

SSE = "sse"


class SpeechOptions(AnswerOptions, frozen=True, kw_only=True):
    speech: AudioOptions

    @property
    def output(self) -> AudioOptions:
        return self.speech


def plan_speech(
    request: SpeechRequest, pipeline: Pipeline, stored_s: float
) -> SubmitPlan[SpeechOptions]:
    """Return the plan of a speech. Raises InvalidRequest naming the field."""
    part = pipeline.with_text_given
    output = part.output_of(AUDIO)
    if output is None:
        raise InvalidRequest(f"{request.model} does not speak", field="model")
    if request.voice is not None:
        check_choice("voice", request.voice, part.voices)
    check_choice("response_format", request.response_format, MEDIA_TYPES)
    check_choice("stream_format", request.stream_format or AUDIO, [AUDIO, SSE])
    generate_request = GenerateRequest(
        request.model,
        given_text=request.input,
        voice=request.voice,
        outputs=[output.name],
        timeout_s=request.timeout_s,
    )
    audio = AudioOptions(output=output.name, format=request.response_format, stored_s=int(stored_s))
    return SubmitPlan(
        [generate_request],
        {},
        SpeechOptions(speech=audio),
        delivery=Delivery.EVENTS if request.stream_format == SSE else Delivery.SOUND,
        durable=bool(request.durable),
    )


class SpeechAssembler(Assembler[SpeechOptions]):
    """Assembler of the events of a speech."""

    def __init__(self, request: Answering[SpeechOptions]) -> None:
        super().__init__(request)
        self.usage = SpeechUsage(0, 0, 0)

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        match record:
            case AudioChunk():
                return [self._delta(record)]
            case Finish():
                self.usage = usage_of(record.outputs)
                return [SpeechDone(self.usage)]
            case _:
                return []

    def _delta(self, record: AudioChunk) -> SpeechDelta:
        if record.first_sample or self.options.speech.format != WAV:
            return SpeechDelta(record.pcm)
        sound = wav_header(record.sample_rate) + base64.b64decode(record.pcm)
        return SpeechDelta(base64.b64encode(sound).decode())

    def answer(self) -> SpeechResult:
        request = self.request
        url = f"/v1/audio/speech/{request.request_id}"
        return SpeechResult(request.request_id, request.created_s, request.model, self.usage, url)


def usage_of(outputs: Mapping[str, OutputSummary]) -> SpeechUsage:
    text = sum(summary.usage.prompt_tokens for summary in outputs.values() if summary.usage)
    frames = int(sum(summary.units.get("frames", 0) for summary in outputs.values()))
    return SpeechUsage(text, frames, text + frames)


SPEECH = AnswerKind(
    name="speech",
    id_prefix="speech",
    options=SpeechOptions,
    assembler=SpeechAssembler,
    client_fields=ClientFields({"given_text": "input", "outputs": "model"}),
    order=lambda options, records: in_speech_order(records, timed=options.speech.timed),
)
