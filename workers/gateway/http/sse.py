"""Server-sent events: their form, and an answer that consists of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from workers.gateway.http import errors

T = TypeVar("T")

# Proxies close what is silent for a minute, some for half of one.
PING_S = 15.0
PING = b": ping\n\n"
# Once there was an id, the official Python client takes a blank line for an event.
PING_NUMBERED = b": ping\n"
DONE = b"data: [DONE]\n\n"

ErrorResponder = Callable[[Exception], Response]


def event(data: bytes, event_id: str = "") -> bytes:
    """`data` is JSON, which has no line ends of its own."""
    named = f"id: {event_id}\n".encode() if event_id else b""
    return b"%bdata: %b\n\n" % (named, data)


class EventStream(Response):
    """The status waits for the first event: what fails before it is an error like any other.

    What fails later is told as the last event but one. When the client goes, `gone` is called. With
    `over` a numbered stream breaks off, as when the gateway dies: its client goes on elsewhere. To
    others that is told like anything else that fails. [DONE] ends all others.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        gone: Callable[[], None],
        over: asyncio.Event,
        answer_of: ErrorResponder,
        headers: dict[str, str],
        *,
        numbered: bool = False,
    ) -> None:
        """`numbered`: the events have ids."""
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._gone = gone
        self._over = over
        self._numbered = numbered
        self._started = False
        self._answer_of = answer_of
        self._ping = PING_NUMBERED if numbered else PING

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(
                receive, self._run(scope, receive, send), self._gone, self._over
            )
        except errors.Interrupted as error:
            if not self._started:
                await self._refuse(error, scope, receive, send)
            elif not self._numbered:
                await send(_body(_last_words(error)))
                await send(_END)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer_of(error)
        answer.headers["x-request-id"] = self.headers["x-request-id"]
        await answer(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = asyncio.create_task(_first(self._events))
        try:
            await asyncio.wait({first}, timeout=PING_S)
            error = first.exception() if first.done() else None
            if isinstance(error, Exception):
                return await self._refuse(error, scope, receive, send)
            self._started = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._pump(first, send)
        finally:
            first.cancel()

    async def _pump(self, first: "asyncio.Task[bytes]", send: Send) -> None:
        line = _Line(send, self._ping)
        pinging = asyncio.create_task(line.ping_often())
        try:
            if not first.done():
                await line.ping()
            await line.write(await first)
            async for sent in self._events:
                await line.write(sent)
        except Exception as error:
            if not isinstance(error, errors.RequestFailed):
                self._answer_of(error)  # For the log.
            await line.write(_last_words(error))
        finally:
            pinging.cancel()
        await send(_END)


# In one piece: who has read [DONE] may take the request for ended at once.
_END: Message = {"type": "http.response.body", "body": DONE, "more_body": False}


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _last_words(error: Exception) -> bytes:
    event_id = error.event_id if isinstance(error, errors.RequestFailed) else ""
    return event(errors.to_json(errors.body_of(errors.info_of(error))), event_id)


async def _first(events: AsyncIterator[bytes]) -> bytes:
    """Nothing, when the client has seen them all."""
    return await anext(events, b"")


class _Line:
    """What has been written last, and when."""

    def __init__(self, send: Send, ping: bytes) -> None:
        self._send = send
        self._ping = ping
        self._loop = asyncio.get_running_loop()
        self._written_s = self._loop.time()

    async def write(self, data: bytes) -> None:
        await self._send(_body(data))
        self._written_s = self._loop.time()

    async def ping(self) -> None:
        await self.write(self._ping)

    async def ping_often(self) -> None:
        while True:
            rest_s = self._written_s + PING_S - self._loop.time()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self.ping()


async def run_until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], gone: Callable[[], None], over: asyncio.Event
) -> T:
    """The result of `work`; when the client goes before, ends it, calls `gone` and raises
    ClientDisconnect, and with `over` ends it and raises Interrupted. To be used when the body has
    been read."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    ending = asyncio.create_task(over.wait())
    tasks = (working, leaving, ending)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if not leaving.done():
            raise errors.Interrupted
        gone()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
