"""`/v1/audio/transcriptions`."""

from typing import NamedTuple

import msgspec
from starlette.responses import PlainTextResponse, Response

from shared import client
from shared.errors import InvalidRequest
from shared.protocol.multimodal import MEDIA_SCHEME
from shared.state import media_store
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.body import declares_json
from workers.gateway.openai.transcription import (
    TEXT,
    TRANSCRIPTION,
    TranscriptionOptions,
    check_transcription,
    plan_transcription,
)
from workers.gateway.route_table import ANSWER_ERRORS, STREAM_PARAMETERS, Call, RouteTable
from workers.gateway.schemas.transcription import (
    UNSUPPORTED,
    StoredTranscription,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionForm,
)

ROUTES = RouteTable("Speech")
FILE = "file"


class Recording(NamedTuple):
    form: TranscriptionForm
    source: bytes | str
    """The file, or the URL of a stored one."""


async def _read(call: Call) -> Recording:
    if not declares_json(call.request):
        return await _read_form(call)
    body = await call.context.bodies.decode(call.request, StoredTranscription, UNSUPPORTED)
    name = media_store.parse_media_url(MEDIA_SCHEME + body.file.removeprefix(MEDIA_SCHEME))
    if name is None:
        raise InvalidRequest("file must be the id of a stored file", field=FILE)
    call.context.check_model(body.model)
    return Recording(body, media_store.media_url(name))


async def _read_form(call: Call) -> Recording:
    """Return the fields and the file. Raises a RequestError that names the wrong field."""
    form, recordings = await call.read_form(TranscriptionForm, UNSUPPORTED, FILE)
    if len(recordings) > 1:
        raise InvalidRequest(f"{FILE} is given twice", field=FILE)
    call.context.check_model(form.model)
    return Recording(form, recordings[0])


def _as_text(body: Recording, response: Response) -> Response:
    """Return the response, as plain text if the client has chosen the format `text`."""
    if body.form.response_format != TEXT or response.status_code != 200:
        return response
    text = msgspec.json.decode(response.body, type=Transcription).text
    return PlainTextResponse(
        f"{text}\n", headers={"x-request-id": response.headers["x-request-id"]}
    )


@ROUTES.answer(
    TRANSCRIPTION,
    "/v1/audio/transcriptions",
    summary="Transcribe a recording",
    body=TranscriptionForm,
    file=FILE,
    json_body=StoredTranscription,
    read=_read,
    finish=_as_text,
    answer=Transcription,
    chunk=TranscriptDelta | TranscriptDone,
    refuses=ANSWER_ERRORS,
    parameters=STREAM_PARAMETERS,
    counted=True,
)
async def transcribe(call: Call, body: Recording) -> SubmitPlan[TranscriptionOptions]:
    check_transcription(body.form)
    return plan_transcription(body.form, await _split(call, body.form.model, body.source))


async def _split(call: Call, model: str, source: bytes | str) -> list[str]:
    """Store the recording and its pieces, and return the URLs of the pieces."""
    context, tenant = call.context, call.caller.tenant
    url = source if isinstance(source, str) else await context.pin_media(source, tenant)
    return (await client.split_sound(context.bus, model, url, tenant)).urls
