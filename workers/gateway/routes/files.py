"""`/v1/files`: media that requests refer to, and input and results of batches.

An upload is stored while it arrives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from shared.errors import DiskFull, InvalidRequest, NotFound, Overloaded, QuotaExceeded, Unavailable
from shared.helpers.taking import take
from shared.protocol import subjects
from shared.state import batch_files
from shared.state.media_store import MediaUpload, StoredFile
from workers.gateway.app import AppContext, Json
from workers.gateway.backend.files import TenantFile, describe, find_file, list_files
from workers.gateway.core.multipart import FileHead, FormEvent, FormStream, FormValue
from workers.gateway.core.pages import limit_of
from workers.gateway.http.auth import Caller
from workers.gateway.http.body import check_form
from workers.gateway.http.body_types import converted
from workers.gateway.http.errors import BodyTooLarge, RequestTimeout
from workers.gateway.route_table import Parameter, RouteTable
from workers.gateway.schemas.files import BATCH, DeletedFile, FileForm, FileList, FileObject

ROUTES = RouteTable("Files")
FILE = "file"
MAX_FILENAME_LEN = 255
MAX_PAGE = 10_000
CONTENT = "application/octet-stream"


@ROUTES.endpoint(
    "POST",
    "/v1/files",
    "Store an image, a video, a sound or a document for requests, or the requests of a batch",
    answer=FileObject,
    body=FileForm,
    file=FILE,
    refuses=(DiskFull, Overloaded, QuotaExceeded, Unavailable),
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
        stored = await _finish(context, caller.tenant, upload, filename, form)
    finally:
        if stored is None:
            # The client may be gone, and must not wait for this.
            context.background.start(upload.abort())
    return Json(describe(context, stored))


@ROUTES.endpoint(
    "GET",
    "/v1/files",
    "The stored files of a tenant, the newest first",
    answer=FileList,
    refuses=(InvalidRequest, NotFound, Unavailable),
    parameters=(
        Parameter("after", "query", "Id of the last file of the page before"),
        Parameter(
            "limit",
            "query",
            f"1 to {MAX_PAGE}, by default {MAX_PAGE}",
            Annotated[int, Meta(ge=1, le=MAX_PAGE)],
        ),
        Parameter("order", "query", "`desc`, the default, or `asc`", Literal["asc", "desc"]),
        Parameter("purpose", "query", "Only files with this purpose"),
    ),
)
async def list_all(context: AppContext, request: Request, caller: Caller) -> Response:
    query = request.query_params
    limit, order = limit_of(query, MAX_PAGE, MAX_PAGE), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    purpose, after = query.get("purpose"), query.get("after")
    files = list_files(context, caller.tenant, purpose, after, newest_first=order == "desc")
    page = await take(files, limit + 1)
    data = page[:limit]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return Json(FileList(data=data, first_id=first_id, last_id=last_id, has_more=len(page) > limit))


@ROUTES.endpoint(
    "GET",
    "/v1/files/{file_id}",
    "Describe a stored file",
    answer=FileObject,
    refuses=(NotFound, Unavailable),
)
async def show_file(context: AppContext, request: Request, caller: Caller) -> Response:
    return Json((await _find(context, request, caller)).body)


@ROUTES.endpoint(
    "GET",
    "/v1/files/{file_id}/content",
    "The bytes of a stored file",
    answer=CONTENT,
    refuses=(NotFound, Unavailable),
)
async def send_content(context: AppContext, request: Request, caller: Caller) -> Response:
    file = await _find(context, request, caller)
    # Files of the tenant must not be opened in a browser.
    headers = {"content-length": str(file.body.bytes), "content-disposition": "attachment"}
    return StreamingResponse(file.read(), headers=headers, media_type=CONTENT)


@ROUTES.endpoint(
    "DELETE",
    "/v1/files/{file_id}",
    "Remove a stored file, also from requests that have not read it yet. Either file of a batch's"
    " results removes both",
    answer=DeletedFile,
    refuses=(NotFound, Overloaded, Unavailable),
)
async def delete_file(context: AppContext, request: Request, caller: Caller) -> Response:
    file = await _find(context, request, caller)
    await file.remove()
    return Json(DeletedFile(id=file.body.id))


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
    # The purpose may follow the content.
    limit = max(_media_limit(context), context.config.batch.max_file_mib * 2**20)
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
    ignores = context.bodies.ignores_unknown
    form = converted(values, FileForm, ignores_unknown=ignores, strict=False)
    return filename[:MAX_FILENAME_LEN], form


async def _finish(
    context: AppContext, tenant: str, upload: MediaUpload, filename: str, form: FileForm
) -> StoredFile:
    """Make an uploaded file available.

    Raises BodyTooLarge, InvalidRequest, Overloaded, QuotaExceeded or Unavailable.
    """
    batch = context.config.batch
    if form.purpose == BATCH:
        if upload.num_bytes > (limit := batch.max_file_mib * 2**20):
            raise BodyTooLarge(f"the input of a batch may have at most {limit} bytes")
        await context.quotas.check(tenant, [subjects.BATCHES_STREAM])
        life_s = min(form.expires_after_s or batch.ttl_s, batch.ttl_s)
        name, head = await upload.seal(filename, form.purpose)
        expires_s = context.now_s + int(life_s)
        return await batch_files.adopt(context.bus, name, head, expires_s, tenant)
    if form.expires_after_s is not None:
        raise InvalidRequest(
            "expires_after is for files with the purpose batch: other files are stored for as long"
            " as requests use them",
            field="expires_after",
        )
    if upload.num_bytes > (limit := _media_limit(context)):
        raise BodyTooLarge(f"a file may have at most {limit} bytes")
    return await upload.finish(filename, form.purpose)


def _media_limit(context: AppContext) -> int:
    return max(context.config.renderer.max_bytes.values())


async def _find(context: AppContext, request: Request, caller: Caller) -> TenantFile:
    file = await find_file(context, caller.tenant, request.path_params["file_id"])
    if file is None:
        raise NotFound("there is no file of this id")
    return file
