"""`/v1/audio/transcriptions`."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from shared import client
from shared.errors import InvalidRequest
from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.ids import read_request_id
from workers.gateway.core.multipart import parse_form
from workers.gateway.http.auth import Caller
from workers.gateway.http.body import check_form
from workers.gateway.http.errors import unwrap_reply, validation_error
from workers.gateway.openai.transcription import (
    TEXT,
    TRANSCRIPTION,
    check_transcription,
    plan_transcription,
)
from workers.gateway.route_table import ANSWER_ERRORS, STREAM_PARAMETERS, RouteTable
from workers.gateway.schemas.transcription import (
    UNSUPPORTED,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionForm,
)

ROUTES = RouteTable("Speech")
FILE = "file"


@ROUTES.endpoint(
    "POST",
    "/v1/audio/transcriptions",
    "Write down what is spoken in a recording",
    answer=Transcription,
    body=TranscriptionForm,
    file=FILE,
    chunk=TranscriptDelta | TranscriptDone,
    refuses=ANSWER_ERRORS,
    parameters=STREAM_PARAMETERS,
    counted=True,
)
async def transcribe(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, TRANSCRIPTION, caller.tenant)
    form, recording = await _read_form(context, request)
    context.check_model(form.model)
    check_transcription(form)
    pieces = await _split(context, form.model, recording, caller.tenant)
    plan = plan_transcription(form, pieces)
    response = await submit(context, request, caller, TRANSCRIPTION, plan)
    if form.response_format != TEXT or response.status_code != 200:
        return response
    text = msgspec.json.decode(response.body, type=Transcription).text
    return PlainTextResponse(
        f"{text}\n", headers={"x-request-id": response.headers["x-request-id"]}
    )


async def _read_form(context: AppContext, request: Request) -> tuple[TranscriptionForm, bytes]:
    """Return the fields and the file. Raises a RequestError that names the wrong field."""
    content_type = check_form(request)
    body = await context.bodies.read(request)
    values, files = await asyncio.to_thread(parse_form, body, content_type)
    if (recording := files.get(FILE)) is None:
        raise InvalidRequest("file is missing", field=FILE)
    if other := next(iter(files.keys() - {FILE}), None):
        raise InvalidRequest(f"{other} is no file", field=other)
    try:
        form = msgspec.convert(_fields_of(values), TranscriptionForm, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(error, UNSUPPORTED) from error
    return form, recording


def _fields_of(values: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return one value for each field. Raises InvalidRequest for a field that is given twice."""
    for name, given in values.items():
        if len(given) > 1 and not name.endswith("[]"):
            raise InvalidRequest(f"{name} is given twice", field=name)
    return {name.removesuffix("[]"): given[0] for name, given in values.items()}


async def _split(context: AppContext, model: str, recording: bytes, tenant: str) -> list[str]:
    """Store the recording and its pieces, and return the URLs of the pieces."""
    with TRANSCRIPTION.client_fields.translated():
        url = await context.pin_media(recording, tenant)
        reply = await client.split_sound(context.bus, model, url, tenant)
        return unwrap_reply(reply).urls
