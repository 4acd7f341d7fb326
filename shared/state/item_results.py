"""Results of item tasks, which several requests may wait for.

A fan-out stage publishes item tasks under the hash of the item's content, so that an item of many
requests is processed once. The stage that gathers results waits for them here. Results are a cache:
a lost result is computed again.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.errors import (
    BlobLost,
    DecodeError,
    EncodingFailed,
    InvalidRequest,
    NumberOverflow,
    Poisoned,
)
from shared.protocol import subjects
from shared.protocol.encoding import UNDECODABLE, Versioned, to_msgpack
from shared.protocol.records import Failure, named_error
from shared.protocol.task_messages import ItemResult
from shared.protocol.versions import check_version
from shared.state.token_log import last_record

# Interval in which a waiting stage checks whether the item task still exists.
LOOK_S = 1.0

T = TypeVar("T")
_decoder = msgspec.msgpack.Decoder(ItemResult)
_version_decoder = msgspec.msgpack.Decoder(Versioned)


async def publish(bus: Bus, key: str, result: ItemResult) -> None:
    await bus.publish_without_id(subjects.result(key), to_msgpack(result))


async def last(bus: Bus, key: str) -> StoredMessage | None:
    """Return the message with the latest result of an item; None without one."""
    return await bus.read_last(subjects.RESULTS_STREAM, subjects.result(key))


def decode(data: bytes) -> ItemResult:
    """Decode a result. Raises UnsupportedVersion for a newer version, and otherwise DecodeError."""
    try:
        version = _version_decoder.decode(data).version
        check_version(version, "an item's result")
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise DecodeError(f"not an item's result: {error}") from error


async def forget(bus: Bus, result: StoredMessage) -> None:
    """Remove a result that is not available any more."""
    await bus.delete(subjects.RESULTS_STREAM, result.sequence)


async def get(bus: Bus, key: str) -> ItemResult | None:
    """Return the result of an item; None while there is none."""
    stored = await last(bus, key)
    return None if stored is None else decode(stored.data)


async def wait(
    bus: Bus,
    key: str,
    get_result: Callable[[], Awaitable[T | None]],
    progress: Callable[[], Awaitable[None]],
) -> T:
    """Wait until `get_result` returns a result other than None, and return it.

    `progress` is called while the item task exists; an error of it ends the wait. Raises BlobLost
    if there is neither a result nor a task, and the error of a task that has failed.
    """
    if (result := await get_result()) is not None:
        return result
    listener = await bus.subscribe(subjects.result(key))
    try:
        while True:
            # The task is read first, because it is removed after its result was published.
            name = subjects.item_task(key)
            task = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(name))
            if (result := await get_result()) is not None:
                return result
            if task is None:
                await _raise_failure(bus, key)
                raise BlobLost("an item's result is lost, and no task for it is queued")
            await progress()
            await listener.next(LOOK_S)
    finally:
        await bus.unsubscribe(listener)


async def reset_failures(bus: Bus, name: str) -> None:
    """Remove the retryable failure of an earlier item task, and its attempts.

    The cause of a retryable failure may have ended. An item that cannot be processed, or that makes
    workers die, stays refused as long as its log is stored.
    """
    record = await last_record(bus, name)
    if isinstance(record, Failure) and record.error.retryable:
        await bus.purge(subjects.ATTEMPTS_STREAM, subjects.attempts(name))
        await bus.purge(subjects.TOKENS_STREAM, subjects.tokens(name))


async def _raise_failure(bus: Bus, key: str) -> None:
    """Raise the error of a failed item task, which is in its log like the answer of a request."""
    record = await last_record(bus, subjects.item_task(key))
    if not isinstance(record, Failure):
        return
    if record.error.fault == "client":
        raise InvalidRequest(record.error.message, field=record.error.field)
    if record.error.code in (NumberOverflow.code, Poisoned.code):
        raise named_error(record.error)
    raise EncodingFailed(f"an item's result could not be computed: {record.error.message}")
