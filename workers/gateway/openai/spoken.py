"""Chat completions with a spoken answer: the checks and the plan. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.pipeline import AUDIO, IMAGE_KIND, TEXT, Pipeline
from workers.gateway.core.plan import SubmitPlan, check_choice
from workers.gateway.core.sound_formats import PCM16, WAV
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.openai.chat import AudioOptions, ChatOptions
from workers.gateway.schemas.openai_request import ChatAudio, ChatRequest


def with_speech(
    plan: SubmitPlan[ChatOptions], request: ChatRequest, pipeline: Pipeline, stored_s: float
) -> SubmitPlan[ChatOptions]:
    """Return the plan of a chat, with a speech if the request asks for one.

    Raises a RequestError naming the field.
    """
    modalities: Sequence[str] = request.modalities or (TEXT,)
    if IMAGE_KIND in modalities:
        raise UnsupportedParameter(
            f"modalities: {IMAGE_KIND!r} is not supported in a chat, because models paint one text"
            " and not a conversation: use /v1/images/generations",
            field="modalities",
        )
    if AUDIO not in modalities:
        if request.audio is not None:
            raise InvalidRequest(f"audio requires {AUDIO!r} in modalities", field=AUDIO)
        if request.on_late == "text":
            raise InvalidRequest(f"on_late requires {AUDIO!r} in modalities", field="on_late")
        return plan
    if sorted(modalities) != sorted([TEXT, AUDIO]):
        raise InvalidRequest(
            f"modalities must be [{TEXT!r}] or [{TEXT!r}, {AUDIO!r}]",
            field="modalities",
        )
    output = pipeline.output_of(AUDIO)
    if output is None:
        raise InvalidRequest(f"modalities: {request.model} does not speak", field="modalities")
    if request.audio is None:
        raise InvalidRequest("modalities: speech requires the field audio", field=AUDIO)
    outputs = [TEXT, output.name]
    _check(request, request.audio, pipeline.part_for(outputs).voices, plan.sampling.get("n", 1))
    speech = AudioOptions(
        output=output.name, format=request.audio.format, stored_s=int(stored_s), timed=output.timed
    )
    voice, on_late = request.audio.voice, request.on_late or "fail"
    return replace(
        plan,
        requests=[
            replace(part, outputs=outputs, voice=voice, on_late=on_late) for part in plan.requests
        ],
        options=replace(plan.options, speech=speech),
    )


def _check(request: ChatRequest, audio: ChatAudio, voices: list[str], n: int) -> None:
    check_choice("audio.voice", audio.voice, voices)
    check_choice("audio.format", audio.format, [PCM16] if request.stream else [PCM16, WAV])
    if n > 1:
        raise InvalidRequest("n: only one answer can be spoken", field="n")
    if request.tools and request.tool_choice != "none":
        raise UnsupportedParameter(
            "tools are not supported for an answer that is spoken", field="tools"
        )
