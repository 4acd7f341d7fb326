"""The queue of clients' requests. A request stays in it until it has ended."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import NotFoundError

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.versions import version_of


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Request as published by its client."""

    data: bytes
    subject: str
    version: int
    """Version that a reader needs."""

    @property
    def request_id(self) -> str:
        return subjects.id_in(self.subject)

    @property
    def tenant(self) -> str:
        """Tenant of the request; "" without one."""
        return subjects.tenant_of(self.subject)


async def queued_request(bus: Bus, sequence: int) -> QueuedRequest | None:
    """Return a client's request that has not ended; None if it is no longer queued."""
    message = await _get_request(bus, sequence, is_next=False)
    return None if message is None else _to_queued_request(message)


async def queued_models(bus: Bus, request_id: str) -> list[str]:
    """Return the models of the queued requests with this id; none if no such request is queued.

    The leader of the stream answers, so each request with an acknowledged publish is found. Raises
    Unavailable.
    """
    queued = await bus.figures.subjects_of(
        subjects.REQUESTS_STREAM, subjects.requests_with_id(request_id)
    )
    return [subjects.model_of_request(subject) for subject in queued]


async def tenants_ids(bus: Bus, name: str) -> set[str]:
    """Return the ids of the queued requests of all tenants with this name. Raises Unavailable."""
    queued = await bus.figures.subjects_of(
        subjects.REQUESTS_STREAM, subjects.tenants_requests(name)
    )
    return {subjects.id_in(subject) for subject in queued}


async def queued_requests(bus: Bus) -> AsyncIterator[QueuedRequest]:
    """Yield all clients' requests that have not ended. Raises Unavailable."""
    sequence = 1
    while (message := await _get_request(bus, sequence, is_next=True)) is not None:
        yield _to_queued_request(message)
        sequence = (message.seq or 0) + 1


async def _get_request(bus: Bus, sequence: int, *, is_next: bool) -> api.RawStreamMsg | None:
    # Unlike a direct get, this reads from the leader of the stream.
    subject = subjects.REQUESTS_FILTER if is_next else None
    try:
        return await bus.connection.js.get_msg(
            subjects.REQUESTS_STREAM, sequence, subject=subject, next=is_next
        )
    except NotFoundError:
        return None
    except NatsError as error:
        raise Unavailable(f"the broker did not return request {sequence}") from error


def _to_queued_request(message: api.RawStreamMsg) -> QueuedRequest:
    return QueuedRequest(message.data or b"", message.subject or "", version_of(message.headers))
