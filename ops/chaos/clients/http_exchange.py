"""What a client and a gateway say to each other over one connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from ops.chaos.plan import Planned

PATH = "/v1/chat/completions"
DONE = "[DONE]"
LOOK_S = 0.1
LOOK_TIMEOUT_S = 2.5


@dataclass(frozen=True, slots=True)
class Opened:
    status: int
    body: str
    """All of an answer that is no stream."""


@dataclass(frozen=True, slots=True)
class Told:
    at: int | None
    data: str


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Somebody works on the request."""


@dataclass(frozen=True, slots=True)
class Lost:
    reason: str


Line = Opened | Told | UnderWay | Lost | None
"""None: the server has let hear from itself."""


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


def ask(
    gateway: httpx.AsyncClient, planned: Planned, start: int, lines: asyncio.Queue[Line]
) -> Coroutine[Any, Any, None]:
    """Under the client's own name for it, from event `start` on."""
    headers = _headers(start, streamed=planned.streamed) | {"x-request-id": planned.id}
    request = gateway.build_request("POST", PATH, json=body_of(planned), headers=headers)
    return _exchange(gateway, request, lines)


def follow(
    gateway: httpx.AsyncClient, planned: Planned, start: int, lines: asyncio.Queue[Line]
) -> Coroutine[Any, Any, None]:
    """As events, however it was asked for."""
    path = f"/v1/requests/{planned.bus_id}/stream"
    request = gateway.build_request("GET", path, headers=_headers(start, streamed=True))
    return _exchange(gateway, request, lines)


async def look(gateway: httpx.AsyncClient, planned: Planned, lines: asyncio.Queue[Line]) -> None:
    """Again and again, until the request is under way."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            path = f"/v1/requests/{planned.id}"
            answer = await gateway.get(path, timeout=LOOK_TIMEOUT_S)
            if answer.status_code == 200 and answer.json()["state"] != "queued":
                lines.put_nowait(UnderWay())
                return
        await asyncio.sleep(LOOK_S)


def _headers(start: int, *, streamed: bool) -> dict[str, str]:
    # With the ids of events, to go on from.
    headers = {"accept": "text/event-stream"} if streamed else {}
    return headers | ({"last-event-id": str(start - 1)} if start else {})


async def _exchange(
    gateway: httpx.AsyncClient, request: httpx.Request, lines: asyncio.Queue[Line]
) -> None:
    """What comes over one connection, to its end."""
    try:
        answer = await gateway.send(request, stream=True)
        try:
            is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            body = "" if is_stream else (await answer.aread()).decode()
            lines.put_nowait(Opened(answer.status_code, body))
            if is_stream:
                async for line in _events(answer.aiter_lines()):
                    lines.put_nowait(line)
            lines.put_nowait(Lost("it ended before its answer"))
        finally:
            await answer.aclose()
    except (httpx.HTTPError, OSError) as error:
        lines.put_nowait(Lost(f"{type(error).__name__}: {error}"))


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[Told | None]:
    at: int | None = None
    data = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            at = int(value)
        elif name == "data":
            data = value
        elif not line and data:
            yield Told(at, data)
            at, data = None, ""
        else:
            yield None
