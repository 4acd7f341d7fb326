"""HTTP connection protocol: limits that apply before a request reaches the ASGI application.

A connection gets an error response and is closed when its headers arrive too slowly or are too
large, when its body has too many chunks or an unknown coding, or when there are too many
connections. A connection whose client does not read its response is aborted. An idle connection may
close for a new one, as `places` decides.
"""

import asyncio
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from starlette.types import Scope
from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from shared.config.schema import GatewayConfig
from shared.errors import InvalidRequest, PagemillError
from shared.protocol.encoding import to_json
from shared.telemetry.metrics import Counter
from workers.gateway.http import errors
from workers.gateway.http.places import ConnectionPlaces, Place

# Chunks per body. The largest allowed body needs fewer, unless its client is malicious.
MAX_CHUNKS = 16_384
# Time between an error response and the close. Closing while a client still sends resets the
# connection, and the client would lose the response.
LINGER_S = 2.0
# Limit on connections without a place that send their last response. Further ones are aborted.
MAX_LINGERING = 64
# Keep-alive time while places are scarce.
SHORT_KEEP_ALIVE_S = 2
# Time between the end of a client's data and the first search for an error of the connection. It
# doubles with every further search.
FIRST_PROBE_S = 0.5
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(slots=True, eq=False)
class ConnectionLimits:
    """Limits and counters that all connections share."""

    config: GatewayConfig
    places: ConnectionPlaces
    refused: Counter
    """New connections for which no other one could close."""
    displaced: Counter
    """Idle connections that were closed for new ones."""
    slow: Counter
    """Connections whose clients did not read their responses."""
    lingering: set[Place] = field(default_factory=set)
    """Places that connections have left before they are closed, to send their last response."""

    def admit(self, place: Place) -> bool:
        """Open the place of a new connection, and close another connection for it if necessary.

        Return False if the new connection must be closed without a response.
        """
        closing = self.places.open(place)
        if closing is place:
            self.refused.add()
            return self.may_linger(place)
        if closing is not None:
            self.displaced.add()
            closing.close()
        return True

    def may_linger(self, place: Place) -> bool:
        """Return whether a connection without a place may send its last response."""
        if len(self.lingering) >= MAX_LINGERING:
            return False
        self.lingering.add(place)
        return True

    def leave(self, place: Place) -> None:
        """Forget a closed connection."""
        self.places.leave(place)
        self.lingering.discard(place)


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection."""

    def __init__(
        self, limits: ConnectionLimits, config: Config, *, place: Place, **kwargs: Any
    ) -> None:
        super().__init__(config, **kwargs)
        self._limits = limits
        self._place = place
        self._is_unsent = False
        """Whether the place becomes idle only when the client has read most of its response."""
        self._in_head = True
        self._in_body = False
        self._is_refused = False
        self._head_bytes = 0
        self._num_chunks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        """Runs while there is data that the client has not read."""
        self._num_unread = 0
        """Unread bytes when `_send_timer` was started."""
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._place.owner is None:
            self.connections.discard(self)
            self._refuse(errors.NoPlace("there are too many connections (gateway.max_connections)"))
        else:
            self._place.close = self._give_way
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._limits.leave(self._place)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        max_kib = self._limits.config.max_header_kib
        if self._in_head and self._head_bytes > max_kib * 2**10:
            self._refuse(errors.HeadersTooLarge(f"the headers may have at most {max_kib} KiB"))
        elif self._is_idle and self._timer is None:
            # This data has stopped the timer between requests, and is not yet a request.
            self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)["claim_place"] = self._claim_place
        self._in_head, self._num_chunks = True, 0
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._stop_timer()
        self._limits.places.renew(self._place)
        if self._has_unknown_coding:
            return self._refuse(_UNKNOWN_CODING)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _end_by_closing(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        super().on_message_complete()
        self._in_body, self._head_bytes = False, 0
        self._stop_timer()

    def on_response_complete(self) -> None:
        self._is_unsent = self.flow.write_paused
        if not self._is_unsent:
            self._limits.places.end(self._place)
        is_scarce = self._limits.places.are_scarce
        self.timeout_keep_alive = (
            SHORT_KEEP_ALIVE_S if is_scarce else self.config.timeout_keep_alive
        )
        super().on_response_complete()
        # With pipelining, the body that is being read may belong to the next request.
        if self._in_body and self.cycle.response_complete:
            # The request was refused before its body ended. The rest of the body is discarded, for
            # a limited time.
            self._set_timer(LINGER_S, self.transport.close)
        self._start_send_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()
        if self._is_unsent:
            self._is_unsent = False
            self._limits.places.end(self._place)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks == MAX_CHUNKS:
            self._refuse(errors.BodyTooLarge(f"a body may have at most {MAX_CHUNKS} chunks"))

    def send_400_response(self, msg: str) -> None:
        invalid = InvalidRequest("this is not a valid HTTP request")
        self._refuse(_UNKNOWN_CODING if self._has_unknown_coding else invalid)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: the client may still read its response."""
        is_answered = self.cycle is None or self.cycle.response_complete
        # A client of HTTP/1.0 gets no interim responses, so the gateway could not find out whether
        # it still reads. Proxies that speak this version close both ways when their clients leave.
        if is_answered or self._in_body or self._is_old or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        """Abort the connection if its client has closed it, and search again later.

        The end of a client's data looks the same if the client has closed the connection, but then
        every byte that is sent to it causes an error. Clients skip an interim response. A response
        that has begun sends pings.
        """
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.transport.is_closing() and not self.cycle.response_started:
            if not self.pipeline:
                self.transport.write(PROBE)
            self._probe_timer = self.loop.call_later(pause_s, self._probe, 2 * pause_s)

    @property
    def _has_unknown_coding(self) -> bool:
        return any(
            name == b"transfer-encoding" and value.strip().lower() != b"chunked"
            for name, value in self.headers or ()
        )

    @property
    def _is_old(self) -> bool:
        """Whether the request has HTTP/1.0."""
        return self.scope["http_version"] == "1.0"

    @property
    def _is_idle(self) -> bool:
        return not self._in_body and (self.cycle is None or self.cycle.response_complete)

    def _claim_place(self, tenant: str) -> None:
        """Count the request that begins for the tenant of its valid key. Raises NoPlace."""
        self._is_unsent = False
        if not self._limits.places.claim(self._place, tenant):
            raise errors.NoPlace(
                "this tenant has too many requests in progress at this gateway, which keeps places"
                " for others (gateway.max_connections); try again when one of them has ended"
            )

    def _give_way(self) -> None:
        """Close the connection for another one. A response that is not sent may end, within
        limits."""
        if self.transport.get_write_buffer_size() and self._limits.may_linger(self._place):
            self.transport.close()
        else:
            self.transport.abort()

    def _refuse(self, error: PagemillError) -> None:
        """Send an error response, ignore all further input, and close after LINGER_S."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        cycle = self.cycle
        is_responding = cycle is not None and cycle.response_started and not cycle.response_complete
        # An error response cannot be sent in the middle of another response.
        if not is_responding:
            info = errors.info_of(error)
            body = to_json(errors.body_of(info))
            after_s = info.retry_after_s
            self.transport.write(
                STATUS_LINE[errors.status_of(info)]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + (b"" if after_s is None else b"retry-after: %d\r\n" % math.ceil(after_s))
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(LINGER_S, self.transport.close)

    def _start_send_timer(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        if self._send_timer is None and num_unread:
            self._num_unread = num_unread
            self._send_timer = self.loop.call_later(
                self._limits.config.send_timeout_s, self._check_send_progress
            )

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_send_progress(self) -> None:
        self._send_timer = None
        if self.transport.get_write_buffer_size() != self._num_unread:
            # The client has read some, however slowly, or the application could write more.
            self._start_send_timer()
        else:
            self._limits.slow.add()
            self.transport.abort()

    def _start_head_timer(self) -> None:
        late = errors.RequestTimeout("the request's headers did not arrive in time")
        self._set_timer(self._limits.config.header_timeout_s, partial(self._refuse, late))

    def _set_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_UNKNOWN_CODING = errors.UnknownCoding(
    "the header Transfer-Encoding has a coding other than chunked", field="Transfer-Encoding"
)


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Send a response without a length as HTTP/1.0 has it: without chunks, up to the close."""
    send, is_unframed = cycle.send, False

    async def send_unframed(message: ASGISendEvent) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_unframed = b"content-length" not in names
            if is_unframed:
                cycle.chunked_encoding = False
        elif is_unframed and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]


def claim_place(scope: Scope, tenant: str) -> None:
    """Count a request with a valid key for its tenant, until its end. Raises NoPlace."""
    claim: Callable[[str], None] | None = scope.get("claim_place")
    if claim is not None:
        claim(tenant)
