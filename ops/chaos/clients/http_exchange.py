"""Exchanges of a client with a gateway: requests, and the items of their answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from ops.chaos.gateway_api import PATH, authorization
from ops.chaos.history import Journal
from ops.chaos.plan import Planned

DONE = "[DONE]"
POLL_S = 0.1
POLL_TIMEOUT_S = 2.5
TIMEOUT = httpx.Timeout(None, connect=2.0)
# The broker is down, or a queue is full; a later attempt may succeed.
TRANSIENT_STATUSES = (503,)


class GatewayClients:
    """Clients of a run that use gateways, each of which can serve any request."""

    def __init__(self, urls: list[str], journal: Journal, session_of: Callable[[str], int]) -> None:
        """`session_of` returns the number of a new session of a request."""
        limits = httpx.Limits(max_connections=None)
        self._gateways = [
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False)
            for url in urls
        ]
        self._journal = journal
        self._session_of = session_of
        self._next_gateway = 0

    async def close(self) -> None:
        for gateway in self._gateways:
            await gateway.aclose()


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """Status of a response, with the complete body unless it is a stream."""

    status: int
    body: str


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """A server-sent event; `at` is its id."""

    at: int | None
    data: str


@dataclass(frozen=True, slots=True)
class RequestRunning:
    """The request has left its queue."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection ended before the answer did."""

    reason: str


ExchangeItem = ResponseStarted | ServerEvent | RequestRunning | ConnectionLost | None
"""An item of an answer; None is a line without content, such as a keep-alive comment."""


def body_of(planned: Planned) -> dict[str, Any]:
    request = planned.request
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "model": request.model,
        "messages": msgspec.to_builtins(request.messages),
        **msgspec.to_builtins(request.sampling_params, str_keys=True),
        "priority": int(request.lane == "batch"),
        "timeout_s": request.timeout_s,
        "durable": planned.durable,
        **(streamed if planned.streamed else {}),
    }


def submit(
    gateway: httpx.AsyncClient, planned: Planned, start: int, lines: asyncio.Queue[ExchangeItem]
) -> Coroutine[Any, Any, None]:
    """Send the request under the client's own id, and read its answer from event `start`."""
    headers = _headers(planned, start, streamed=planned.streamed) | {"x-request-id": planned.id}
    request = gateway.build_request("POST", PATH, json=body_of(planned), headers=headers)
    return _exchange(gateway, request, lines)


def follow(
    gateway: httpx.AsyncClient, planned: Planned, start: int, lines: asyncio.Queue[ExchangeItem]
) -> Coroutine[Any, Any, None]:
    """Read the events of a request that was sent before, from event `start`."""
    path = f"/v1/requests/{planned.id}/stream"
    request = gateway.build_request("GET", path, headers=_headers(planned, start, streamed=True))
    return _exchange(gateway, request, lines)


async def wait_until_running(
    gateway: httpx.AsyncClient, planned: Planned, lines: asyncio.Queue[ExchangeItem]
) -> None:
    """Poll the state of the request until it has left its queue."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            path = f"/v1/requests/{planned.id}"
            headers = authorization(planned.tenant)
            answer = await gateway.get(path, timeout=POLL_TIMEOUT_S, headers=headers)
            if answer.status_code == 200 and answer.json()["state"] != "queued":
                lines.put_nowait(RequestRunning())
                return
        await asyncio.sleep(POLL_S)


def _headers(planned: Planned, start: int, *, streamed: bool) -> dict[str, str]:
    headers = authorization(planned.tenant)
    # Answers of this media type have ids of events, so that a client can resume.
    headers |= {"accept": "text/event-stream"} if streamed else {}
    return headers | ({"last-event-id": str(start - 1)} if start else {})


async def _exchange(
    gateway: httpx.AsyncClient, request: httpx.Request, lines: asyncio.Queue[ExchangeItem]
) -> None:
    """Put every item that one connection yields into the queue, to its end."""
    try:
        answer = await gateway.send(request, stream=True)
        try:
            is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            body = "" if is_stream else (await answer.aread()).decode()
            lines.put_nowait(ResponseStarted(answer.status_code, body))
            if is_stream:
                async for line in _events(answer.aiter_lines()):
                    lines.put_nowait(line)
            lines.put_nowait(ConnectionLost("the connection ended before its answer"))
        finally:
            await answer.aclose()
    except (httpx.HTTPError, OSError) as error:
        lines.put_nowait(ConnectionLost(f"{type(error).__name__}: {error}"))


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[ServerEvent | None]:
    at: int | None = None
    data = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            at = int(value)
        elif name == "data":
            data = value
        elif not line and data:
            yield ServerEvent(at, data)
            at, data = None, ""
        else:
            yield None
