"""The list of a tenant's files: uploads of media, input files of batches, and results of batches.

The broker has a small message for each file, its mark, which is stored at the same time. The list
is read from the marks while it is used, so a page of it does not depend on the number of files.
"""

import asyncio
from collections.abc import AsyncIterator

from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.helpers.taking import take
from shared.protocol import subjects
from shared.protocol.messages import decode_media_head
from shared.state import media_store
from shared.state.batch_log import READ_AT_ONCE, open_batch
from shared.state.media_store import StoredFile

TIME_STEP_MS = 0.001
"""Resolution of the times of stored messages."""


async def times_of(bus: Bus, tenant: str, token: str) -> list[float]:
    """Return the times of the marks with a last token, in Unix milliseconds of the broker's clock.

    Media and an input file may have equal bytes, and so the same token. Raises Unavailable.
    """
    reads = (bus.read_last(stream, subject) for stream, subject in _marks(tenant, token))
    return [mark.stored_ms for mark in await asyncio.gather(*reads) if mark is not None]


async def iterate_files(
    bus: Bus, tenant: str, start_ms: float | None, *, newest_first: bool
) -> AsyncIterator[StoredFile | BatchState]:
    """Yield the stored files, and the batches with results, in order of their times.

    The list begins with all files of the time `start_ms`. Raises Unavailable.
    """
    sources = [
        _read(bus, stream, subject, start_ms, newest_first=newest_first)
        for stream, subject in _marks(tenant, "*")
    ]
    marks = _merge(sources, newest_first=newest_first)
    while block := await take(marks, READ_AT_ONCE):
        for file in await asyncio.gather(*(_open(bus, tenant, mark) for mark in block)):
            if file is not None:
                yield file


def _marks(tenant: str, token: str) -> list[tuple[str, str]]:
    """Return the subjects of marks with a last token, which may be `*`, each after its stream."""
    return [
        (subjects.MEDIA_STREAM, subjects.media_upload(tenant, token)),
        (subjects.BATCHES_STREAM, subjects.stored_batch(subjects.batch_file(tenant, token))),
    ]


async def _read(
    bus: Bus, stream: str, subject: str, start_ms: float | None, *, newest_first: bool
) -> AsyncIterator[StoredMessage]:
    """Yield the messages of `subject` in order of their times, from a time on."""
    position = None
    if start_ms is not None:
        # A backwards read begins before its position.
        since_ms = start_ms + TIME_STEP_MS if newest_first else start_ms
        position = await bus.first_since(stream, subject, since_ms)
    if newest_first:
        messages = bus.read_backwards(stream, subject, position)
    elif start_ms is not None and position is None:
        return
    else:
        messages = bus.read_forwards(stream, subject, position or 1)
    async for message in messages:
        yield message


async def _merge(
    sources: list[AsyncIterator[StoredMessage]], *, newest_first: bool
) -> AsyncIterator[StoredMessage]:
    """Yield the messages of all sources in order of their times."""
    choose = max if newest_first else min
    heads = [(source, await anext(source, None)) for source in sources]
    while waiting := [(source, head) for source, head in heads if head is not None]:
        source, head = choose(waiting, key=lambda pair: pair[1].stored_ms)
        yield head
        heads = [(s, await anext(s, None) if s is source else h) for s, h in waiting]


async def _open(bus: Bus, tenant: str, mark: StoredMessage) -> StoredFile | BatchState | None:
    """Return the file or the batch of a mark; None if it is not stored any more."""
    token = subjects.last_token(mark.subject)
    if mark.subject == subjects.media_upload(tenant, token):
        return await media_store.look_up(bus, token, tenant)
    if token.startswith(subjects.RESULTS_MARK):
        log = await open_batch(bus, tenant, token.removeprefix(subjects.RESULTS_MARK))
        return None if log is None else log.state
    head = decode_media_head(mark.data)
    return None if head is None else StoredFile(token, head, mark.stored_ms)
