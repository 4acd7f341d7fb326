"""Batches in the broker: the orders of clients, and the fenced log of each batch."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from msgspec import structs

from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.errors import Fenced, NotFound, PagemillError, UnsupportedVersion
from shared.helpers.taking import take
from shared.protocol import names, subjects
from shared.protocol.batch_log import (
    BatchBegun,
    BatchCancelled,
    BatchEnded,
    BatchJob,
    BatchRecord,
    Checkpoint,
    LineError,
    Results,
    decode_batch_begun,
    decode_batch_cancelled,
    decode_batch_record,
)
from shared.protocol.encoding import to_json
from shared.protocol.requests import tenant_header
from shared.protocol.stored_size import LOG_BYTES_HEADER, MESSAGE_BYTES
from shared.state import batch_room
from shared.state.any_tenant import only_tenant
from shared.state.batch_files import replacing_headers
from shared.state.log_pages import PagedLog, PagedRecord

READ_AT_ONCE = 16
CANCELLED_EARLY_S = 3600.0
"""Time for which the cancellation of an unknown batch is stored."""


class BatchLog:
    """Log of one batch, up to the last record that this process has read or appended."""

    def __init__(self, bus: Bus, state: BatchState, last_sequence: int) -> None:
        self.state = state
        self._bus = bus
        self._last_sequence = last_sequence
        begun = state.begun
        self._subject = subjects.batch_log(begun.tenant, begun.batch_id)

    @property
    def next_index(self) -> int:
        return 0 if self.state.last is None else self.state.last.index + 1

    async def append(self, record: BatchRecord) -> None:
        """Append the next record.

        Raises Fenced if another batcher has appended a record, and Overloaded if the stream is
        full; results leave its reserve free. After Overloaded or Unavailable, the same record may
        be appended again.
        """
        begun, data = self.state.begun, to_json(record)
        if isinstance(record, Results):
            await batch_room.check(self._bus, len(data))
        checkpoint, num_bytes = record.checkpoint, len(data)
        if not (isinstance(record, BatchEnded) and record.removed):
            num_bytes += checkpoint.output_bytes + checkpoint.error_bytes
        headers = tenant_header(begun.tenant) | {LOG_BYTES_HEADER: str(num_bytes)}
        ttl_s = begun.expires_s - self._bus.now_ms() / 1000
        if isinstance(record, BatchEnded) and num_bytes > len(data):
            # The batch has results. Lists of files skip a mark without an end, but miss an end
            # without a mark.
            await self._mark_results()
        try:
            self._last_sequence = await self._bus.append(
                self._subject, data, self._last_sequence, ttl_s, headers
            )
        except Fenced:
            # The record is stored if only its acknowledgement was lost.
            stored = await self._bus.read_last(
                subjects.BATCHES_STREAM, subjects.stored_batch(self._subject)
            )
            if stored is None or stored.data != data:
                raise
            self._last_sequence = stored.sequence
        self.state = replace(self.state, last=record)

    async def _mark_results(self) -> None:
        """Store the mark of the results, see `shared.state.file_list`."""
        begun = self.state.begun
        subject = subjects.batch_results(begun.tenant, begun.batch_id)
        headers = replacing_headers(self._bus, begun.expires_s, begun.tenant)
        await self._bus.publish_without_id(subject, b"", headers)

    async def is_cancelled(self) -> bool:
        """Read the order to cancel the batch, and return whether there is one."""
        if self.state.cancelled is None:
            begun = self.state.begun
            cancelled = await _read_cancelled(self._bus, begun.tenant, begun.batch_id)
            self.state = replace(self.state, cancelled=cancelled)
        return self.state.cancelled is not None


async def open_batch(bus: Bus, tenant: str, batch_id: str) -> BatchLog | None:
    """Return the log of a batch; None if there is no such batch.

    Only the orders and the last record are read, so the time does not depend on the results. Raises
    Unavailable, and UnsupportedVersion if a newer batcher has written the log.
    """
    if not names.is_name(batch_id):
        return None
    begun, cancelled, last = await asyncio.gather(
        _read_begun(bus, tenant, batch_id),
        _read_cancelled(bus, tenant, batch_id),
        bus.read_last(
            subjects.BATCHES_STREAM, subjects.stored_batch(subjects.batch_log(tenant, batch_id))
        ),
    )
    order = None if begun is None else decode_batch_begun(begun.data)
    if order is None:
        return None
    if last is None:
        return BatchLog(bus, BatchState(order, cancelled), 0)
    record = decode_batch_record(last.data)
    if record is None:
        raise UnsupportedVersion(f"the log of {batch_id} has a record that cannot be read")
    return BatchLog(bus, BatchState(order, cancelled, record), last.sequence)


async def _read_begun(bus: Bus, tenant: str, batch_id: str) -> StoredMessage | None:
    subject = subjects.stored_batch(subjects.batch_begun(tenant, batch_id))
    return await bus.read_last(subjects.BATCHES_STREAM, subject)


async def _read_cancelled(bus: Bus, tenant: str, batch_id: str) -> BatchCancelled | None:
    subject = subjects.stored_batch(subjects.batch_cancelled(tenant, batch_id))
    stored = await bus.read_last(subjects.BATCHES_STREAM, subject)
    return None if stored is None else decode_batch_cancelled(stored.data)


async def tenant_of(bus: Bus, batch_id: str) -> str | None:
    """Return the tenant of a stored batch; None without one.

    Raises InvalidRequest for an id that several tenants use, and Unavailable.
    """
    place = subjects.batches_named(batch_id)
    orders = await bus.figures.subjects_of(subjects.BATCHES_STREAM, place)
    return only_tenant(batch_id, map(subjects.tenant_of, orders), "batch")


async def begin(bus: Bus, begun: BatchBegun) -> None:
    """Store the order to run a batch, and queue the batch.

    Raises Fenced if the tenant has a batch with this id, Overloaded or Unavailable.
    """
    # Orders must not fill the reserve. They may have much metadata.
    await batch_room.check(bus, len(to_json(begun)))
    # A batcher waits for the order of a queued batch, but no process queues a forgotten order.
    await queue_batch(bus, begun)
    await _store_order(bus, begun)


async def refuse(bus: Bus, begun: BatchBegun, error: PagemillError) -> None:
    """Store a batch that has failed before any of its lines was read, unless it exists.

    Raises Overloaded or Unavailable.
    """
    await batch_room.check(bus, len(to_json(begun)))
    reason = LineError(error.code, error.message, param=error.field)
    end = BatchEnded(0, begun.created_s, "failed", Checkpoint(), [reason])
    # A batch exists when its order is stored, so the order comes last.
    with contextlib.suppress(Fenced):
        await BatchLog(bus, BatchState(begun), 0).append(end)
    with contextlib.suppress(Fenced):
        await _store_order(bus, begun)


async def _store_order(bus: Bus, begun: BatchBegun) -> None:
    subject = subjects.batch_begun(begun.tenant, begun.batch_id)
    ttl_s = begun.expires_s - bus.now_ms() / 1000
    await bus.append(subject, to_json(begun), 0, ttl_s, tenant_header(begun.tenant))


async def queue_batch(bus: Bus, begun: BatchBegun) -> None:
    """Queue a batch, unless it is queued. Raises Overloaded or Unavailable."""
    job = to_json(BatchJob(begun.batch_id, begun.tenant))
    await bus.publish_without_id(subjects.batch_job(begun.tenant, begun.batch_id), job)


async def cancel(bus: Bus, begun: BatchBegun) -> None:
    """Store the order to cancel a batch. Raises Overloaded or Unavailable."""
    ttl_s = begun.expires_s - bus.now_ms() / 1000
    await _store_cancellation(bus, begun.tenant, begun.batch_id, ttl_s)


async def cancel_by_id(bus: Bus, tenant: str, batch_id: str) -> None:
    """Cancel a batch, also one whose order arrives later. Raises Overloaded or Unavailable."""
    log = await open_batch(bus, tenant, batch_id)
    if log is None:
        # Cancellations of batches that never begin must not fill the reserve.
        await batch_room.check(bus, MESSAGE_BYTES)
        await _store_cancellation(bus, tenant, batch_id, CANCELLED_EARLY_S)
    elif log.state.ended is None:
        await cancel(bus, log.state.begun)


async def _store_cancellation(bus: Bus, tenant: str, batch_id: str, ttl_s: float) -> None:
    subject = subjects.batch_cancelled(tenant, batch_id)
    order = to_json(BatchCancelled(int(bus.now_ms() / 1000)))
    with contextlib.suppress(Fenced):  # The batch is cancelled already.
        await bus.append(subject, order, 0, ttl_s, tenant_header(tenant))


async def list_begun(
    bus: Bus, tenant: str | None, limit: int | None = None, after: str | None = None
) -> list[BatchBegun]:
    """Return the orders of a tenant's stored batches, the newest first, at most `limit`.

    Without a tenant, which is None, they are the orders of all tenants.

    With `after`, the list begins with the next order after this batch. Raises NotFound if there is
    no such batch, and Unavailable.
    """
    return await take(iterate_begun(bus, tenant, after), limit)


async def iterate_begun(
    bus: Bus, tenant: str | None, after: str | None = None
) -> AsyncIterator[BatchBegun]:
    """Yield the orders that `list_begun` returns. They are read as they are used."""
    end = None
    if after is not None:
        stored = await _read_begun(bus, tenant or "", after) if names.is_name(after) else None
        if stored is None:
            raise NotFound(f"the list has no {after!r}", field="after")
        end = stored.sequence
    subject = subjects.batches_named("*")
    if tenant is not None:
        subject = subjects.stored_batch(subjects.batch_begun(tenant, "*"))
    async for message in bus.read_backwards(subjects.BATCHES_STREAM, subject, end):
        order = decode_batch_begun(message.data)
        if order is not None:
            yield order


async def open_batches(bus: Bus, begun: Sequence[BatchBegun]) -> list[BatchState]:
    """Return the states of batches that are still stored. Raises Unavailable."""
    states: list[BatchState] = []
    for first in range(0, len(begun), READ_AT_ONCE):
        orders = begun[first : first + READ_AT_ONCE]
        logs = await asyncio.gather(*(open_batch(bus, o.tenant, o.batch_id) for o in orders))
        states += [log.state for log in logs if log is not None]
    return states


async def read_results(
    bus: Bus, begun: BatchBegun, first_sequence: int = 1
) -> tuple[list[tuple[int, Results]], int]:
    """Return a page of the records with results, each with its sequence, and the next sequence.

    The next sequence is 0 at the end of the log. Raises Unavailable.
    """
    subject = subjects.stored_batch(subjects.batch_log(begun.tenant, begun.batch_id))
    stored, has_more = await bus.read_batch(subjects.BATCHES_STREAM, subject, first_sequence)
    results = [
        (message.sequence, record)
        for message in stored
        if isinstance(record := decode_batch_record(message.data), Results)
    ]
    return results, stored[-1].sequence + 1 if stored and has_more else 0


def paged(tenant: str, batch_id: str) -> PagedLog:
    """Return the log of a batch for readers of pages."""
    subject = subjects.stored_batch(subjects.batch_log(tenant, batch_id))
    return PagedLog(subjects.BATCHES_STREAM, subject, _decode_paged)


def _decode_paged(data: bytes) -> PagedRecord | None:
    record = decode_batch_record(data)
    return None if record is None else PagedRecord(record.index, isinstance(record, BatchEnded))


async def remove_results(bus: Bus, log: BatchLog) -> None:
    """Remove the results of a batch that has ended; its last record stays.

    Raises Overloaded or Unavailable.
    """
    ended, begun = log.state.ended, log.state.begun
    assert ended is not None, "only a batcher removes records of other batches"
    if not ended.removed:
        with contextlib.suppress(Fenced):  # Another gateway has removed them.
            await log.append(structs.replace(ended, index=log.next_index, removed=True))
    subject = subjects.stored_batch(subjects.batch_log(begun.tenant, begun.batch_id))
    await bus.purge(subjects.BATCHES_STREAM, subject, keep=1)
    mark = subjects.stored_batch(subjects.batch_results(begun.tenant, begun.batch_id))
    await bus.purge(subjects.BATCHES_STREAM, mark)
