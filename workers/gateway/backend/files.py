"""The files of a tenant: media, input files of batches, and the results of batches."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from shared.bus.streams import MEDIA_REUSE_S
from shared.errors import NotFound
from shared.protocol import subjects
from shared.protocol.multimodal import MEDIA_SCHEME
from shared.state import batch_files, batch_log, file_list, media_store
from shared.state.media_store import StoredFile
from workers.gateway.app import AppContext
from workers.gateway.backend.batches import (
    FILE_PREFIX,
    ResultFile,
    find_result_file,
    read_result_file,
    result_files,
)
from workers.gateway.schemas.files import BATCH_OUTPUT, FileForm, FileObject

PAGE_BYTES = 2**20


class TenantFile(NamedTuple):
    """A file that a tenant may read and delete."""

    body: FileObject
    mark: str
    """Last token of the subject of its mark, see `shared.state.file_list`."""
    read: Callable[[], AsyncIterator[bytes]]
    """Returns the content, in pieces."""
    remove: Callable[[], Awaitable[None]]


async def find_file(context: AppContext, tenant: str, file_id: str) -> TenantFile | None:
    """Return the file of this id; None if the tenant has none. Raises Unavailable."""
    result = await find_result_file(context, tenant, file_id)
    if result is not None:
        return _of_result(context, result)
    name = media_store.parse_media_url(MEDIA_SCHEME + file_id)
    if name is None:
        return None
    media, input_file = await asyncio.gather(
        media_store.look_up(context.bus, name, tenant),
        batch_files.look_up(context.bus, name, tenant),
    )
    file = media or input_file
    return None if file is None else _of_stored(context, file, tenant)


async def list_files(
    context: AppContext, tenant: str, purpose: str | None, after: str | None, *, newest_first: bool
) -> AsyncIterator[FileObject]:
    """Yield the files of a tenant in order of their times; all of them, or those with a purpose.

    With `after`, the list begins after this file. It is read while it is used. Raises NotFound if
    there is no such file, and Unavailable.
    """
    bus, start_ms, is_after = context.bus, None, after is None
    if after is not None:
        file = await find_file(context, tenant, after)
        times = [] if file is None else await file_list.times_of(bus, tenant, file.mark)
        if not times:
            raise NotFound(f"the list has no {after!r}", field="after")
        # A list that has the file twice must end.
        start_ms = min(times) if newest_first else max(times)
    async for entry in file_list.iterate_files(bus, tenant, start_ms, newest_first=newest_first):
        if isinstance(entry, StoredFile):
            files = [describe(context, entry)]
        else:
            files = [_describe_result(file) for file in result_files(entry)]
        for body in files if newest_first else reversed(files):
            if is_after and purpose in (None, body.purpose):
                yield body
            is_after = is_after or body.id == after


def describe(context: AppContext, file: StoredFile) -> FileObject:
    stored_s = int(file.stored_ms / 1000)
    # A request that names the file is refused if it could run longer than the file is stored.
    age_s = MEDIA_REUSE_S + context.config.delivery.max_timeout_s
    return FileObject(
        id=FILE_PREFIX + file.name,
        bytes=file.head.num_bytes,
        created_at=stored_s,
        expires_at=file.head.expires_s or stored_s + int(age_s),
        filename=file.head.filename or file.name,
        purpose=file.head.purpose or FileForm().purpose,
    )


def _describe_result(file: ResultFile) -> FileObject:
    begun, ended = file.state.begun, file.state.ended
    assert ended is not None, "a batch has files when it has ended"
    return FileObject(
        id=file.file_id,
        bytes=file.num_bytes,
        created_at=ended.at_s,
        expires_at=begun.expires_s,
        filename=f"{begun.batch_id}_{file.kind}.jsonl",
        purpose=BATCH_OUTPUT,
    )


def _of_result(context: AppContext, file: ResultFile) -> TenantFile:
    async def remove() -> None:
        begun = file.state.begun
        log = await batch_log.open_batch(context.bus, begun.tenant, begun.batch_id)
        if log is not None:
            await batch_log.remove_results(context.bus, log)

    mark = f"{subjects.RESULTS_MARK}{file.state.begun.batch_id}"
    body = _describe_result(file)
    return TenantFile(body, mark, lambda: read_result_file(context.bus, file), remove)


def _of_stored(context: AppContext, file: StoredFile, tenant: str) -> TenantFile:
    bus, is_input = context.bus, file.head.expires_s is not None

    async def read() -> AsyncIterator[bytes]:
        if is_input:
            async for data, _ in batch_files.read(bus, file, tenant):
                yield data
            return
        position = 0
        while position < file.head.num_bytes:
            page = await media_store.read_page(bus, file.name, position, PAGE_BYTES, tenant)
            if page is None:
                raise NotFound("the file was removed while it was sent")
            yield page.data
            position = page.next

    async def remove() -> None:
        if is_input:
            await batch_files.remove(bus, file.name, tenant)
        else:
            await media_store.remove(bus, file, tenant)

    return TenantFile(describe(context, file), file.name, read, remove)
