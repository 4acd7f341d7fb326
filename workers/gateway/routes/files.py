"""`/v1/files`: media that requests refer to, stored while they arrive."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from shared.bus.streams import MEDIA_REUSE_S
from shared.errors import DiskFull, InvalidRequest, NotFound, QuotaExceeded, Unavailable
from shared.protocol.multimodal import MEDIA_SCHEME
from shared.state import media_store
from shared.state.media_store import MediaUpload, StoredFile
from workers.gateway.app import AppContext, Json
from workers.gateway.core.multipart import FileHead, FormEvent, FormStream, FormValue
from workers.gateway.http.auth import Caller
from workers.gateway.http.body import check_form
from workers.gateway.http.errors import BodyTooLarge, RequestTimeout, validation_error
from workers.gateway.route_table import RouteTable

ID_PREFIX = "file-"


class FileForm(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the form, except for `file`."""

    purpose: Annotated[str, Meta(max_length=64)] = "user_data"
    """Purpose of the file, such as `vision` or `user_data`; it has no effect."""


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    """`file-` and the SHA-256 of the file's bytes. A URL in a request is `media:` and this id."""
    bytes: int
    created_at: int
    """Unix seconds."""
    expires_at: int
    """Unix seconds until which the file is stored at least. Each request that names the file starts
    the time again."""
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


ROUTES = RouteTable("Files")
FILE = "file"
MAX_FILENAME_LEN = 255


@ROUTES.endpoint(
    "POST",
    "/v1/files",
    "Store an image, a video, a sound or a document for requests",
    answer=FileObject,
    body=FileForm,
    file=FILE,
    refuses=(DiskFull, QuotaExceeded, Unavailable),
    counted=True,
)
async def upload_file(context: AppContext, request: Request, caller: Caller) -> Response:
    form_stream = FormStream(check_form(request))
    upload = MediaUpload(context.bus, caller.tenant)
    stored: StoredFile | None = None
    try:
        async with _in_time(context):
            events = _receive(context, request, form_stream)
            filename, form = await _store(context, caller.tenant, events, upload)
        stored = await upload.finish(filename, form.purpose)
    finally:
        if stored is None:
            # The client may be gone, and must not wait for this.
            context.background.start(upload.abort())
    return Json(_describe(context, stored))


@ROUTES.endpoint(
    "GET",
    "/v1/files/{file_id}",
    "Describe a stored file",
    answer=FileObject,
    refuses=(NotFound, Unavailable),
)
async def show_file(context: AppContext, request: Request, caller: Caller) -> Response:
    return Json(_describe(context, await _find(context, request, caller)))


@ROUTES.endpoint(
    "DELETE",
    "/v1/files/{file_id}",
    "Remove a stored file, also from requests that have not read it yet",
    answer=DeletedFile,
    refuses=(NotFound, Unavailable),
)
async def delete_file(context: AppContext, request: Request, caller: Caller) -> Response:
    file = await _find(context, request, caller)
    await media_store.remove(context.bus, file, caller.tenant)
    return Json(DeletedFile(id=ID_PREFIX + file.name))


@contextlib.asynccontextmanager
async def _in_time(context: AppContext) -> AsyncIterator[None]:
    """Limit the time in which a whole body arrives and is stored. Raises RequestTimeout."""
    timeout_s = context.limits.upload_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None


async def _receive(
    context: AppContext, request: Request, form: FormStream
) -> AsyncIterator[FormEvent]:
    """Yield the parts of the body as they arrive. Raises RequestTimeout if a piece is late."""
    timeout_s = context.limits.body_timeout_s
    pieces = aiter(request.stream())
    while not form.is_complete:
        try:
            async with asyncio.timeout(timeout_s):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise RequestTimeout(f"no data of the body arrived within {timeout_s:g} s") from None
        except ClientDisconnect:
            piece = None
        if piece is None:
            raise InvalidRequest("the body ends before its last boundary")
        for event in form.feed(piece):
            yield event


async def _store(
    context: AppContext, tenant: str, events: AsyncIterator[FormEvent], upload: MediaUpload
) -> tuple[str, FileForm]:
    """Store the file of a form, and return its name and the form's fields.

    Raises DiskFull, and QuotaExceeded, also while the file arrives.
    """
    await context.room.check()
    limit = max(context.config.renderer.max_bytes.values())
    values: dict[str, str] = {}
    filename: str | None = None
    async for event in events:
        match event:
            case FileHead(field, name):
                if field != FILE or filename is not None:
                    reason = "is given twice" if field == FILE else "must not be a file"
                    raise InvalidRequest(f"{field} {reason}", field=field)
                filename = name
            case FormValue(field, value):
                if field in values:
                    raise InvalidRequest(f"{field} is given twice", field=field)
                values[field] = value
            case bytes():
                if upload.num_bytes + len(event) > limit:
                    raise BodyTooLarge(f"a file may have at most {limit} bytes")
                await context.media_quotas.check(tenant, len(event))
                await upload.write(event)
    if filename is None:
        raise InvalidRequest("file is missing", field=FILE)
    try:
        return filename[:MAX_FILENAME_LEN], msgspec.convert(values, FileForm)
    except msgspec.ValidationError as error:
        raise validation_error(error, frozenset()) from error


async def _find(context: AppContext, request: Request, caller: Caller) -> StoredFile:
    name = media_store.parse_media_url(MEDIA_SCHEME + request.path_params["file_id"])
    file = None
    if name is not None:
        file = await media_store.look_up(context.bus, name, caller.tenant)
    if file is None:
        raise NotFound("there is no file of this id")
    return file


def _describe(context: AppContext, file: StoredFile) -> FileObject:
    stored_s = int(file.stored_ms / 1000)
    # A request that names the file is refused if it could run longer than the file is stored.
    age_s = MEDIA_REUSE_S + context.config.delivery.max_timeout_s
    return FileObject(
        id=ID_PREFIX + file.name,
        bytes=file.head.num_bytes,
        created_at=stored_s,
        expires_at=stored_s + int(age_s),
        filename=file.head.filename or file.name,
        purpose=file.head.purpose or FileForm().purpose,
    )
