"""Server-sent events: their encoding, and the streaming response."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shared.protocol.encoding import to_json
from shared.protocol.records import ErrorInfo
from workers.gateway.http import errors

T = TypeVar("T")

# Proxies close a connection that is silent for a minute, some after half a minute.
PING_S = 15.0
# After an event with an id, the official Python client takes a blank line for another event.
PING = b": ping\n\n"
PING_NUMBERED = b": ping\n"
DONE = b"data: [DONE]\n\n"

ErrorResponder = Callable[[Exception], Response]


def event(data: bytes, event_id: str = "") -> bytes:
    """Return one encoded event. `data` is JSON without line breaks."""
    id_line = f"id: {event_id}\n".encode() if event_id else b""
    return b"%bdata: %b\n\n" % (id_line, data)


class EventStream(Response):
    """A response of server-sent events, which starts with the first event.

    An error before the first event becomes a normal error response. A later error is sent as an
    event, followed by [DONE]. `on_disconnect` is called when the client disconnects.

    When `shutting_down` is set, a numbered stream breaks off as if the gateway had died, so that
    its client resumes at another gateway. Any other stream reports the shutdown like an error.
    """

    media_type = "text/event-stream"
    end = DONE
    """The last bytes of the body."""
    ping = PING
    ping_numbered = PING_NUMBERED
    error_body: Callable[[ErrorInfo], Any] = staticmethod(errors.body_of)
    error_head = b""
    """Line of the event of an error, before its data."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_disconnect: Callable[[], None],
        shutting_down: asyncio.Event,
        error_response: ErrorResponder,
        headers: dict[str, str],
        *,
        numbered: bool = False,
    ) -> None:
        """`numbered` is true for events with ids. `error_response` makes responses for errors."""
        super().__init__(None, 200, headers)
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._on_disconnect = on_disconnect
        self._shutting_down = shutting_down
        self._numbered = numbered
        self._started = False
        self._written_s = time.monotonic()
        self._error_response = error_response

    @staticmethod
    def encode(data: bytes, event_id: str = "") -> bytes:
        return event(data, event_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._run(scope, receive, send)
        try:
            await run_until_disconnect(receive, work, self._on_disconnect, self._shutting_down)
        except errors.Interrupted as error:
            if not self._started:
                await self._send_error(error, scope, receive, send)
            elif not self._numbered:
                await send(_body(self._error_event(error)))
                await self._send_end(send)

    async def _send_error(
        self, error: Exception, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = self._error_response(error)
        answer.headers["x-request-id"] = self.headers["x-request-id"]
        await answer(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Empty when the client has already seen all events.
        first = asyncio.ensure_future(anext(self._events, b""))
        try:
            await asyncio.wait({first}, timeout=PING_S)
            error = first.exception() if first.done() else None
            if isinstance(error, Exception):
                return await self._send_error(error, scope, receive, send)
            self._started = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._send_events(first, send)
        finally:
            first.cancel()

    async def _send_events(self, first: "asyncio.Future[bytes]", send: Send) -> None:
        pinging = asyncio.create_task(self._keep_alive(send))
        try:
            if not first.done():
                await self._ping(send)
            await self._write(await first, send)
            async for encoded in self._events:
                await self._write(encoded, send)
        except Exception as error:
            if not isinstance(error, errors.RequestFailed):
                self._error_response(error)  # Only to log the error.
            await self._write(self._error_event(error), send)
        finally:
            pinging.cancel()
        await self._send_end(send)

    async def _send_end(self, send: Send) -> None:
        # [DONE] and the end of the body are one message, because for a client that has read [DONE]
        # the request may have ended.
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    def _error_event(self, error: Exception) -> bytes:
        event_id = error.event_id if isinstance(error, errors.RequestFailed) else ""
        body = self.error_body(errors.info_of(error))
        return self.error_head + self.encode(to_json(body), event_id)

    async def _write(self, data: bytes, send: Send) -> None:
        await send(_body(data))
        self._written_s = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        """Send a ping whenever nothing was sent for PING_S."""
        while True:
            rest_s = self._written_s + PING_S - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self._ping(send)

    async def _ping(self, send: Send) -> None:
        await self._write(self.ping_numbered if self._numbered else self.ping, send)


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


class LineStream(EventStream):
    """A response of JSON lines. An empty line means that the connection is alive."""

    media_type = "application/x-ndjson"
    end = b""
    ping = b"\n"

    @staticmethod
    def encode(data: bytes, _: str = "") -> bytes:
        return data + b"\n"


async def run_until_disconnect(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    on_disconnect: Callable[[], None],
    shutting_down: asyncio.Event,
) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects first.

    Calls `on_disconnect` and raises ClientDisconnect when the client disconnects; raises
    Interrupted when `shutting_down` is set. The body must have been read before.
    """
    working = asyncio.create_task(work)
    disconnecting = asyncio.create_task(_wait_disconnect(receive))
    ending = asyncio.create_task(shutting_down.wait())
    tasks = (working, disconnecting, ending)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if not disconnecting.done():
            raise errors.Interrupted
        on_disconnect()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
