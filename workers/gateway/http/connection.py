"""The server's own edge: what is refused before there is a request that a route could be found for.

A connection that sends headers for ever, too many of them, or a body of countless tiny chunks is
told so and closed, and so is one that is more than there may be. One that does not take what it is
sent is closed without a word.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shared.config import GatewayConfig
from shared.errors import InvalidRequest, Overloaded, PagemillError
from shared.telemetry.metrics import Counter
from workers.gateway.http import errors

# Of one body; the largest allowed needs fewer, unless somebody means harm.
MAX_CHUNKS = 16_384
# To close while a client still sends is to reset, and it would not see what it was told.
LINGER_S = 2.0
# They linger too, and would be a crowd of their own; more are closed without a word.
MAX_REJECTED = 64


class ConnectionLimits:
    """What all connections share."""

    def __init__(
        self, limits: GatewayConfig, max_connections: int, refused: Counter, slow: Counter
    ) -> None:
        """`refused` counts those that were too many, `slow` those that did not read."""
        self.max_header_bytes = limits.max_header_kib * 2**10
        self.header_timeout_s = limits.header_timeout_s
        self.send_timeout_s = limits.send_timeout_s
        self.max_connections = max_connections
        self.refused = refused
        self.slow = slow
        self.turned_away: set[LimitedHttpProtocol] = set()
        """Told that they are too many, and not closed yet."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection."""

    def __init__(self, entrance: ConnectionLimits, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._entrance = entrance
        self._in_head = True
        self._in_body = False
        self._refused = False
        self._head_bytes = 0
        self._chunks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        """Runs while there is something that the client has not taken."""
        self._num_unread = 0
        """Bytes, when that began to run."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._entrance.max_connections:
            self._turn_away()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_waiting_for_reader()
        self._entrance.turned_away.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._entrance.max_header_bytes:
            self._refuse(errors.HeadersTooLarge("the request's headers are too large"))
        elif self._is_idle and self._timer is None:
            # What has come is no request yet, and has ended the time of an idle connection.
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._chunks = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body, self._head_bytes = False, 0
        self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The body that is being read may be that of a next request, sent without waiting.
        if self._in_body and self.cycle.response_complete:
            # It is refused, and what is left of it is nobody's; it may not go on for ever.
            self._set_timer(LINGER_S, self.transport.close)
        self._wait_for_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks == MAX_CHUNKS:
            self._refuse(errors.BodyTooLarge("the body has too many chunks"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("this is not a valid HTTP request"))

    @property
    def _is_idle(self) -> bool:
        return not self._in_body and (self.cycle is None or self.cycle.response_complete)

    def _turn_away(self) -> None:
        self.connections.discard(self)
        self._entrance.refused.add()
        if len(self._entrance.turned_away) < MAX_REJECTED:
            self._entrance.turned_away.add(self)
            self._refuse(Overloaded("there are too many connections"))
        else:
            self._refused = True
            self.transport.abort()

    def _refuse(self, error: PagemillError) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        # In the middle of another answer there is no place for this one.
        if not answering:
            info = errors.info_of(error)
            body = errors.to_json(errors.body_of(info))
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

    def _wait_for_reader(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        if self._unread is None and num_unread:
            self._num_unread = num_unread
            self._unread = self.loop.call_later(self._entrance.send_timeout_s, self._look_at_reader)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look_at_reader(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() != self._num_unread:
            # However slowly, it has taken some; or there was room for more to be written.
            self._wait_for_reader()
        else:
            self._entrance.slow.add()
            self.transport.abort()

    def _await_head(self) -> None:
        self._set_timer(self._entrance.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._refuse(errors.RequestTimeout("the request's headers did not arrive in time"))

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, act)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
