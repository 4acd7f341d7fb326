"""Dead letters: look at them, and send their requests on the way once more."""

from collections.abc import AsyncIterator

import msgspec

from shared.bus.bus import Bus
from shared.errors import InvalidRequest, NotFound
from shared.protocol import subjects
from shared.protocol.messages import DeadLetter, tenant_header

_letter = msgspec.msgpack.Decoder(DeadLetter)


async def read_newest(bus: Bus, limit: int) -> AsyncIterator[DeadLetter]:
    """The latest `limit` letters, the newest first."""
    first, sequence = await bus.sequence_range(subjects.DEAD_STREAM)
    while limit > 0 and sequence >= first:
        stored = await bus.read_next(subjects.DEAD_STREAM, sequence)
        if stored is not None and stored.sequence == sequence:
            yield _letter.decode(stored.data)
            limit -= 1
        sequence -= 1


async def find(bus: Bus, request_id: str) -> DeadLetter:
    """Raises NotFound."""
    if not subjects.is_name(request_id):
        raise InvalidRequest("not a request id", field="request_id")
    stored = await bus.read_last(subjects.DEAD_STREAM, subjects.dead_of(request_id))
    if stored is None:
        raise NotFound(f"no dead letter of request {request_id}", field="request_id")
    letter: DeadLetter = _letter.decode(stored.data)
    return letter


async def requeue(bus: Bus, request_id: str, model: str, request: bytes, tenant: str = "") -> None:
    """Send `request` on its way again under its id, as if it had never been tried.

    What its log says of the failure is removed, and then the letter. `request` must carry its id
    in its body. Raises PayloadTooLarge, Overloaded or Unavailable; the letter then stays.
    """
    await bus.purge(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    await bus.purge(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    # Under a message id of its own it would be taken for the first one's repetition.
    await bus.publish_without_id(subjects.request(model), request, tenant_header(tenant))
    await bus.purge(subjects.DEAD_STREAM, subjects.dead_of(request_id))
