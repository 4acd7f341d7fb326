"""Clients of a run that go through the gateways, one of them as good as another.

One whose connection breaks, or says nothing for a while, goes on over the next gateway: it asks
again under the same name, from the event after the last that it has seen. The silent connection it
closes only when it has another, for to close it is to want no answer any more.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from ops.chaos.history import Accepted, Asked, AskedToCancel, Broke, Journal, Saw, now
from ops.chaos.plan import Planned

PATH = "/v1/chat/completions"
DONE = "[DONE]"
# A gateway that has nothing to say would say so after 15 s.
SILENCE_S = 2.5
AGAIN_S = 0.3
TIMEOUT = httpx.Timeout(None, connect=2.0)
# What may pass: the broker is away, or a queue is full.
PASSING = (503,)


@dataclass(slots=True)
class _Reader:
    """Somebody who wants an answer from event `next` on, over however many connections."""

    next: int = 0
    publishes: bool = True
    intervenes: bool = False
    ended: bool = False
    left: bool = False
    """It has closed its connection, and wants to see what becomes of that."""
    silent: list["asyncio.Task[None]"] = field(default_factory=list)
    """Connections that it has turned away from."""


@dataclass(frozen=True, slots=True)
class _Opened:
    status: int
    body: str


@dataclass(frozen=True, slots=True)
class _Told:
    at: int | None
    data: str


@dataclass(frozen=True, slots=True)
class _Lost:
    reason: str


_Line = _Opened | _Told | _Lost | None


def body_of(planned: Planned) -> dict[str, Any]:
    request = planned.request
    return {
        "model": request.model,
        "messages": msgspec.to_builtins(request.messages),
        **msgspec.to_builtins(request.sampling_params, str_keys=True),
        "priority": int(request.lane == "batch"),
        "timeout_s": request.timeout_s,
        "durable": planned.durable,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class HttpLoad:
    def __init__(self, urls: list[str], journal: Journal, session_of: Callable[[str], int]) -> None:
        """`session_of` gives each session of a request its number."""
        limits = httpx.Limits(max_connections=None)
        self._gateways = [
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False)
            for url in urls
        ]
        self._journal = journal
        self._session_of = session_of
        self._turn = 0

    async def close(self) -> None:
        for gateway in self._gateways:
            await gateway.aclose()

    async def be_client(self, planned: Planned, give_up: float) -> None:
        """One client to the end of its request."""
        async with asyncio.TaskGroup() as beside:

            def join(reader: _Reader) -> None:
                beside.create_task(self._read(planned, reader, give_up, None))

            reader = _Reader(intervenes=planned.behaviour in ("cancel", "ask_during", "follow"))
            await self._read(planned, reader, give_up, join)
        if planned.behaviour == "ask_after":
            await self._read(planned, _Reader(), give_up, None)

    async def _read(
        self,
        planned: Planned,
        reader: _Reader,
        give_up: float,
        join: Callable[[_Reader], None] | None,
    ) -> None:
        self._turn += 1
        number = self._turn
        try:
            while not reader.ended and now() < give_up:
                number += 1
                await self._session(planned, number % len(self._gateways), reader, join)
        finally:
            for task in reader.silent:
                task.cancel()

    async def _session(
        self,
        planned: Planned,
        number: int,
        reader: _Reader,
        join: Callable[[_Reader], None] | None,
    ) -> None:
        """Over one connection, as long as it lasts."""
        session = self._session_of(planned.id)
        publishes = reader.publishes and not reader.left
        self._journal.write(Asked(now(), planned.id, session, reader.next, publishes))
        lines: asyncio.Queue[_Line] = asyncio.Queue()
        talking = asyncio.create_task(
            _talk(self._gateways[number], planned, reader.next, lines, publishes=publishes)
        )
        try:
            while not reader.ended:
                async with asyncio.timeout(SILENCE_S):
                    line = await lines.get()
                if isinstance(line, _Lost):
                    await self._broke(planned, session, "connection", line.reason)
                    return
                if isinstance(line, _Opened) and not self._is_open(planned, session, reader, line):
                    await self._broke(planned, session, str(line.status), line.body)
                    return
                if isinstance(line, _Told) and line.at is None and line.data != DONE:
                    # Not what has become of the request, but that the broker does not answer.
                    await self._broke(planned, session, "unavailable", line.data)
                    return
                if isinstance(line, _Told):
                    self._saw(planned, session, reader, line)
                    if await self._intervene(planned, number, reader, line, join):
                        return
        except TimeoutError:
            reader.silent.append(talking)
            await self._broke(planned, session, "silence", "nothing for a while")
            return
        finally:
            if talking not in reader.silent:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)

    def _is_open(self, planned: Planned, session: int, reader: _Reader, opened: _Opened) -> bool:
        """Or is over; False for what is to be tried again."""
        if opened.status in PASSING:
            return False
        if reader.publishes:
            self._journal.write(Accepted(now(), planned.id, session, False))
        for task in reader.silent:
            task.cancel()
        if opened.status != 200:
            self._saw(planned, session, reader, _Told(None, opened.body))
            self._saw(planned, session, reader, _Told(None, DONE))
        return True

    def _saw(self, planned: Planned, session: int, reader: _Reader, told: _Told) -> None:
        self._journal.write(Saw(now(), planned.id, session, told.at, told.data))
        if told.at is not None:
            reader.next = told.at + 1
        reader.ended |= told.data == DONE

    async def _broke(self, planned: Planned, session: int, code: str, reason: str) -> None:
        self._journal.write(Broke(now(), planned.id, session, code, reason))
        await asyncio.sleep(AGAIN_S)

    async def _intervene(
        self,
        planned: Planned,
        number: int,
        reader: _Reader,
        told: _Told,
        join: Callable[[_Reader], None] | None,
    ) -> bool:
        """What this client does when it has seen so much; whether it closes its connection."""
        if not reader.intervenes or told.at is None or told.at < planned.after_records:
            return False
        reader.intervenes = False
        if planned.behaviour == "cancel" and not planned.durable:
            reader.left = True
            self._journal.write(AskedToCancel(now(), planned.id, number))
            return True
        if planned.behaviour == "cancel":
            await self._delete(planned, number)
        elif join is not None:
            follows = planned.behaviour == "follow"
            join(_Reader(told.at if follows else 0, publishes=not follows))
        return False

    async def _delete(self, planned: Planned, number: int) -> None:
        """At another gateway; what fails there is tried once more at the next."""
        for turn in (1, 2):
            gateway = self._gateways[(number + turn) % len(self._gateways)]
            with contextlib.suppress(httpx.HTTPError):
                answer = await gateway.delete(f"/v1/requests/{planned.id}", timeout=SILENCE_S)
                if answer.status_code == 202:
                    self._journal.write(AskedToCancel(now(), planned.id))
                    return


def _talk(
    gateway: httpx.AsyncClient,
    planned: Planned,
    start: int,
    lines: asyncio.Queue[_Line],
    *,
    publishes: bool,
) -> Coroutine[Any, Any, None]:
    # With the ids of events, to go on from.
    headers = {"accept": "text/event-stream"}
    if start:
        headers["last-event-id"] = str(start - 1)
    if publishes:
        headers["x-request-id"] = planned.id
        request = gateway.build_request("POST", PATH, json=body_of(planned), headers=headers)
    else:
        path = f"/v1/requests/{planned.bus_id}/stream"
        request = gateway.build_request("GET", path, headers=headers)
    return _exchange(gateway, request, lines)


async def _exchange(
    gateway: httpx.AsyncClient, request: httpx.Request, lines: asyncio.Queue[_Line]
) -> None:
    """What comes over one connection, to its end."""
    try:
        answer = await gateway.send(request, stream=True)
        try:
            ok = answer.status_code == 200
            body = "" if ok else (await answer.aread()).decode()
            lines.put_nowait(_Opened(answer.status_code, body))
            if ok:
                async for line in _events(answer.aiter_lines()):
                    lines.put_nowait(line)
            lines.put_nowait(_Lost("it ended before its answer"))
        finally:
            await answer.aclose()
    except (httpx.HTTPError, OSError) as error:
        lines.put_nowait(_Lost(f"{type(error).__name__}: {error}"))


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[_Told | None]:
    """None: the server has let hear from itself."""
    at: int | None = None
    data = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            at = int(value)
        elif name == "data":
            data = value
        elif not line and data:
            yield _Told(at, data)
            at, data = None, ""
        else:
            yield None
