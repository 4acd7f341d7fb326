"""`/v1/audio/speech` and `/v1/audio/voices`."""

from starlette.requests import Request
from starlette.responses import Response

from shared.errors import InvalidRequest, NotFound
from shared.protocol.records import Failure, Finish
from workers.gateway.app import AppContext, Json
from workers.gateway.backend.active_request import find_request
from workers.gateway.backend.sound import SoundStream, etag_of
from workers.gateway.core.byte_ranges import read_range
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.core.sound_formats import MEDIA_TYPES, sound_len
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.openai.chat import AudioOptions
from workers.gateway.openai.speech import SPEECH, SpeechOptions, plan_speech
from workers.gateway.route_table import (
    ANSWER_ERRORS,
    STREAM_PARAMETERS,
    Call,
    Parameter,
    RouteTable,
)
from workers.gateway.schemas.speech import (
    UNSUPPORTED,
    SpeechDelta,
    SpeechDone,
    SpeechRequest,
    VoiceEntry,
    VoiceList,
)

ROUTES = RouteTable("Speech")


@ROUTES.answer(
    SPEECH,
    "/v1/audio/speech",
    summary="Speak a text; the sound is sent while it is generated",
    body=SpeechRequest,
    unsupported=UNSUPPORTED,
    answer=MEDIA_TYPES["wav"],
    chunk=SpeechDelta | SpeechDone,
    refuses=ANSWER_ERRORS,
    parameters=STREAM_PARAMETERS,
    counted=True,
)
async def speak(call: Call, body: SpeechRequest) -> SubmitPlan[SpeechOptions]:
    pipeline = call.context.pipelines[body.model]
    return plan_speech(body, pipeline, call.context.config.delivery.token_log_age_s)


@ROUTES.endpoint(
    "GET",
    "/v1/audio/speech/{id}",
    "The sound of a speech, or of a spoken answer, again; a range of bytes continues it",
    answer=MEDIA_TYPES["wav"],
    refuses=(InvalidRequest, NotFound, errors.RangeNotSatisfiable, *ANSWER_ERRORS),
    parameters=(
        Parameter("Range", "header", "One range, such as `bytes=4800-`"),
        Parameter("If-Range", "header", "The ETag of the sound. Any other ETag returns the whole"),
    ),
    statuses=(200, 206),
    counted=True,
)
async def replay(context: AppContext, request: Request, caller: Caller) -> Response:
    active = await find_request(context, request, caller)
    speech = active.options.output
    if not isinstance(speech, AudioOptions):
        raise NotFound("this request has no speech", field="id")
    (last,) = await active.last_records()
    if isinstance(last, Failure):
        raise errors.RequestFailed(active.client_error(last), "")
    total = None
    if isinstance(last, Finish):
        summary = last.outputs[speech.output]
        # The number of samples of a speech that ended with an error is not known.
        if summary.error is None:
            total = sound_len(speech.format, int(summary.units["samples"]))
    etag = etag_of(active.request_id)
    header = request.headers.get("range", "")
    part = read_range(header, total) if request.headers.get("if-range", etag) == etag else None
    # A client that only reads a request does not cancel it by disconnecting.
    return SoundStream(
        context, active, active.follow_logs(), speech.format, lambda: None, part, total
    )


@ROUTES.endpoint("GET", "/v1/audio/voices", "The voices of all models", answer=VoiceList)
async def list_voices(context: AppContext, _: Request, __: Caller) -> Response:
    voices = [
        VoiceEntry(voice, model)
        for model, pipeline in context.pipelines.items()
        for voice in pipeline.with_text_given.voices
    ]
    return Json(VoiceList(voices))
