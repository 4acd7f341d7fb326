"""The queues of clients' requests. A request stays in its queue until it has ended.

Trusted publishers, such as gateways, share the queue REQUESTS. The clients with a tenant's key have
a queue for this tenant alone, see `subjects.queues_of_tenant`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import NotFoundError

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.subjects import RequestPlace
from shared.protocol.versions import version_of


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Request as published by its client."""

    data: bytes
    subject: str
    version: int
    """Version that a reader needs."""
    place: RequestPlace

    @property
    def request_id(self) -> str:
        return subjects.id_in(self.subject)

    @property
    def tenant(self) -> str:
        """Tenant of the request; "" without one."""
        return subjects.tenant_of(self.subject)


async def queued_request(bus: Bus, place: RequestPlace) -> QueuedRequest | None:
    """Return a client's request that has not ended; None if it is no longer queued."""
    message = await _get_request(bus, place, is_next=False)
    return None if message is None else _to_queued_request(message, place.stream)


async def queued_models(bus: Bus, request_id: str) -> list[str]:
    """Return the models of the queued requests with this id; none if no such request is queued.

    The leader of each stream answers, so each request with an acknowledged publish is found. Raises
    Unavailable.
    """
    filters = subjects.requests_with_id(request_id)
    queued = await _queued_subjects(bus, filters.items())
    return [subjects.model_of_request(subject) for subject in queued]


async def tenants_ids(bus: Bus, name: str) -> set[str]:
    """Return the ids of the queued requests of all tenants with this name. Raises Unavailable."""
    filters = subjects.tenants_requests(name)
    streams_with = await asyncio.gather(*map(bus.figures.streams_with, filters))
    pairs = [
        (stream, subject)
        for subject, names in zip(filters, streams_with, strict=True)
        for stream in names
    ]
    return {subjects.id_in(subject) for subject in await _queued_subjects(bus, pairs)}


async def queued_requests(bus: Bus) -> AsyncIterator[QueuedRequest]:
    """Yield all clients' requests that have not ended. Raises Unavailable."""
    for stream in await streams(bus):
        sequence = 1
        while message := await _get_request(bus, RequestPlace(stream, sequence), is_next=True):
            yield _to_queued_request(message, stream)
            sequence = (message.seq or 0) + 1


async def streams(bus: Bus) -> list[str]:
    """Return the streams of all queues. Raises Unavailable."""
    return await bus.figures.streams_with(subjects.REQUESTS_FILTER)


async def streams_of_tenants(bus: Bus) -> list[str]:
    """Return the queues of tenants, for requests and for cancellations. Raises Unavailable."""
    both = [await bus.figures.streams_with(subjects.CANCELS_FILTER), await streams(bus)]
    return [stream for names in both for stream in names if subjects.tenant_of_queue(stream)]


async def remove_unused(bus: Bus) -> list[str]:
    """Remove the empty queues of tenants that have no key any more, and return them.

    Raises Unavailable.
    """
    await bus.streams.find_tenants()
    removed = []
    for stream in await streams_of_tenants(bus):
        if stream in bus.streams.queues_of_tenants or (await bus.figures.size(stream))[0]:
            continue
        try:
            await bus.connection.js.delete_stream(stream)
        except NatsError as error:
            raise Unavailable(f"the broker did not remove stream {stream}: {error}") from error
        removed.append(stream)
    return removed


async def size(bus: Bus) -> tuple[int, float | None]:
    """Return the number of requests in all queues, and the oldest storage time in Unix ms."""
    sizes = await asyncio.gather(*(bus.figures.size(stream) for stream in await streams(bus)))
    oldest_ms = min((ms for _, ms in sizes if ms is not None), default=None)
    return sum(number for number, _ in sizes), oldest_ms


async def depth(bus: Bus) -> tuple[int, int]:
    """Return the numbers of undelivered and delivered requests in all queues.

    Raises NotFound before the first coordinator has run.
    """
    depths = await asyncio.gather(
        *(bus.figures.depth(stream, subjects.REQUESTS_CONSUMER) for stream in await streams(bus))
    )
    return sum(each.num_pending for each in depths), sum(each.num_in_flight for each in depths)


async def _queued_subjects(bus: Bus, filters: Iterable[tuple[str, str]]) -> list[str]:
    """Return the subjects of the queued requests that match one of `filters` of streams.

    An order for a batch is no request, and may have the same id as one.
    """
    queued = await asyncio.gather(*(bus.figures.subjects_of(*each) for each in filters))
    return [subject for each in queued for subject in each if not subjects.is_batch_order(subject)]


async def _get_request(bus: Bus, place: RequestPlace, *, is_next: bool) -> api.RawStreamMsg | None:
    # Unlike a direct get, this reads from the leader of the stream.
    subject = subjects.REQUESTS_FILTER if is_next else None
    try:
        return await bus.connection.js.get_msg(
            place.stream, place.sequence, subject=subject, next=is_next
        )
    except NotFoundError:
        return None
    except NatsError as error:
        raise Unavailable(f"the broker did not return request {place.sequence}") from error


def _to_queued_request(message: api.RawStreamMsg, stream: str) -> QueuedRequest:
    return QueuedRequest(
        message.data or b"",
        message.subject or "",
        version_of(message.headers),
        RequestPlace(stream, message.seq or 0),
    )
