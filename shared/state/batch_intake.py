"""Acceptance of batches: the checks that each order passes before its batch begins."""

from msgspec import Raw

from shared.batches.orders import check_endpoint, parse_window
from shared.bus.bus import Bus
from shared.config.schema import BatchConfig
from shared.errors import InvalidRequest, NotFound, TooManyBatches
from shared.protocol.batch_log import BatchBegun
from shared.protocol.batch_orders import BatchOrder
from shared.protocol.multimodal import MEDIA_SCHEME
from shared.state import batch_files, batch_log, media_store
from shared.state.media_store import StoredFile

_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")


async def accept(
    bus: Bus, limits: BatchConfig, tenant: str, batch_id: str, order: BatchOrder
) -> BatchBegun:
    """Check an order, and return the record that begins its batch. Its lines become an input file.

    Raises InvalidRequest, NotFound, TooManyBatches, Overloaded or Unavailable.
    """
    check_endpoint(order.endpoint)
    window_s, now_s = parse_window(order.completion_window, limits.max_window_h), _now_s(bus)
    deadline_s, expires_s = now_s + window_s, now_s + int(limits.ttl_s)
    await _check_unfinished(bus, limits, tenant)
    file = await _input_of(bus, order, expires_s, tenant)
    if (file.head.expires_s or expires_s) < deadline_s:
        raise InvalidRequest(
            "the input file expires before the window ends: upload it again with a later"
            " expires_after",
            field="input_file_id",
        )
    if order.output_expires_after is not None:
        expires_s = min(expires_s, deadline_s + order.output_expires_after.seconds)
    return BatchBegun(
        batch_id,
        tenant,
        order.endpoint,
        file.name,
        now_s,
        order.completion_window,
        deadline_s,
        expires_s,
        order.metadata or {},
    )


async def _input_of(bus: Bus, order: BatchOrder, expires_s: int, tenant: str) -> StoredFile:
    if (order.input_file_id is None) == (order.lines is None):
        raise InvalidRequest(
            "a batch has either input_file_id or lines: send one of them", field="input_file_id"
        )
    if order.lines is not None:
        content = b"".join(_in_one_line(line) for line in order.lines)
        return await batch_files.store(bus, content, expires_s, tenant)
    name = media_store.parse_media_url(f"{MEDIA_SCHEME}{order.input_file_id}")
    if name is not None:
        file = await batch_files.look_up(bus, name, tenant)
        if file is not None:
            return file
        if await media_store.look_up(bus, name, tenant) is not None:
            raise InvalidRequest(
                "the input file must be uploaded with the purpose batch", field="input_file_id"
            )
    raise NotFound(f"there is no file {order.input_file_id!r}", field="input_file_id")


def _in_one_line(line: Raw) -> bytes:
    """Return a line of a file. JSON has line breaks only between its tokens."""
    return bytes(line).translate(_LINE_BREAKS) + b"\n"


async def _check_unfinished(bus: Bus, limits: BatchConfig, tenant: str) -> None:
    """Raises TooManyBatches."""
    # A batch ends with its window.
    now_s, limit, recent = _now_s(bus), limits.max_unfinished, list[BatchBegun]()
    async for order in batch_log.iterate_begun(bus, tenant):
        if order.created_s <= now_s - 3600 * limits.max_window_h:
            break
        if order.deadline_s > now_s:
            recent.append(order)
    if len(recent) < limit:
        return
    states = await batch_log.open_batches(bus, recent)
    if sum(state.ended is None for state in states) >= limit:
        raise TooManyBatches(
            f"{limit} batches of this tenant have not ended, the limit (batch.max_unfinished):"
            " try again when one has ended"
        )


def _now_s(bus: Bus) -> int:
    return int(bus.now_ms() / 1000)
