"""`/v1/audio/speech` and `/v1/audio/voices`."""

from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import InvalidRequest, Unavailable
from shared.protocol.pipeline import AUDIO
from shared.protocol.requests import GenerateRequest
from workers.gateway.app import AppContext, Json
from workers.gateway.backend.sound import MEDIA_TYPES, SoundStream
from workers.gateway.core.choices import check_choice
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import ANSWER_ERRORS, RouteTable
from workers.gateway.schemas.speech import UNSUPPORTED, SpeechRequest, VoiceEntry, VoiceList

ROUTES = RouteTable("Speech")


@ROUTES.endpoint(
    "POST",
    "/v1/audio/speech",
    "Speak a text; the body comes as the sound is made",
    answer=MEDIA_TYPES["wav"],
    body=SpeechRequest,
    refuses=ANSWER_ERRORS,
    counted=True,
)
async def speak(context: AppContext, request: Request, caller: Caller) -> Response:
    if context.shutting_down.is_set():
        raise Unavailable("the gateway is being stopped")
    request_id = client.new_request_id()
    request.scope["request_id"] = request_id, True
    asked = await context.bodies.decode(request, SpeechRequest, UNSUPPORTED)
    context.check_model(asked.model)
    part = context.pipelines[asked.model].with_text_given
    output = part.output_of(AUDIO)
    if output is None:
        raise InvalidRequest(f"{asked.model} does not speak", field="model")
    if asked.voice is not None:
        check_choice("voice", asked.voice, part.voices)
    check_choice("response_format", asked.response_format, MEDIA_TYPES)
    check_choice("stream_format", asked.stream_format or AUDIO, [AUDIO])
    context.bodies.release(request)
    wanted = GenerateRequest(
        asked.model,
        request_id=request_id,
        given_text=asked.input,
        voice=asked.voice,
        outputs=[output.name],
        timeout_s=asked.timeout_s or context.config.delivery.default_timeout_s,
    )
    return SoundStream(context, wanted, output.name, asked.response_format, caller.tenant)


@ROUTES.endpoint("GET", "/v1/audio/voices", "The voices of all models", answer=VoiceList)
async def list_voices(context: AppContext, _: Request, __: Caller) -> Response:
    voices = [
        VoiceEntry(voice, model)
        for model, pipeline in context.pipelines.items()
        for voice in pipeline.with_text_given.voices
    ]
    return Json(VoiceList(voices))
