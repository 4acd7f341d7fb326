"""Clients of a run that go through the gateways, one of them as good as another.

One whose connection breaks, or says nothing for a while, goes on over the next gateway: it asks
again under the same name, from the event after the last that it has seen. The silent connection it
closes only when it has another, for to close it is to want no answer any more.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from ops.chaos.clients import http_exchange
from ops.chaos.clients.http_exchange import (
    DONE,
    Line,
    Lost,
    Opened,
    Told,
    UnderWay,
)
from ops.chaos.history import (
    Accepted,
    Asked,
    AskedToCancel,
    Broke,
    Journal,
    Saw,
    now,
)
from ops.chaos.plan import Planned

# A gateway that has nothing to say would say so after 15 s.
SILENCE_S = 2.5
# One that answers with the whole is silent until then.
WHOLE_SILENCE_S = 12.0
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
        session, began = self._session_of(planned.id), now()
        publishes = reader.publishes and not reader.left
        self._journal.write(Asked(began, planned.id, session, reader.next, publishes))
        lines: asyncio.Queue[Line] = asyncio.Queue()
        start = http_exchange.ask if publishes else http_exchange.follow
        talking = asyncio.create_task(start(self._gateways[number], planned, reader.next, lines))
        whole = publishes and not planned.streamed
        looking = self._look(planned, number + 1, lines) if whole and reader.intervenes else None
        try:
            while not reader.ended:
                async with asyncio.timeout(WHOLE_SILENCE_S if whole else SILENCE_S):
                    line = await lines.get()
                if (fault := _fault_of(line)) is not None:
                    await self._broke(planned, session, *fault)
                    return
                if isinstance(line, Opened):
                    self._opened(planned, session, reader, line, began if whole else now())
                if isinstance(line, Told):
                    self._saw(planned, session, reader, line)
                if _is_time(planned, reader, line):
                    at = line.at if isinstance(line, Told) else None
                    if await self._intervene(planned, number, reader, at or 0, join):
                        return
        except TimeoutError:
            reader.silent.append(talking)
            await self._broke(planned, session, "silence", "nothing for a while")
            return
        finally:
            ending = [task for task in (talking, looking) if task and task not in reader.silent]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _look(
        self, planned: Planned, number: int, lines: asyncio.Queue[Line]
    ) -> "asyncio.Task[None]":
        """Who is shown nothing before the end finds out elsewhere when it is time."""
        gateway = self._gateways[number % len(self._gateways)]
        return asyncio.create_task(http_exchange.look(gateway, planned, lines))

    def _opened(
        self, planned: Planned, session: int, reader: _Reader, opened: Opened, accepted: float
    ) -> None:
        """`accepted`: no later than the request was."""
        if reader.publishes:
            self._journal.write(Accepted(accepted, planned.id, session, False))
        for task in reader.silent:
            task.cancel()
        if opened.body:
            self._saw(planned, session, reader, Told(None, opened.body))
            self._saw(planned, session, reader, Told(None, DONE))

    def _saw(self, planned: Planned, session: int, reader: _Reader, told: Told) -> None:
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
        at: int,
        join: Callable[[_Reader], None] | None,
    ) -> bool:
        """What this client does in the middle of it; whether it closes its connection."""
        reader.intervenes = False
        if planned.behaviour == "cancel" and not planned.durable:
            reader.left = True
            self._journal.write(AskedToCancel(now(), planned.id, number))
            return True
        if planned.behaviour == "cancel":
            await self._delete(planned, number)
        elif join is not None:
            follows = planned.behaviour == "follow"
            join(_Reader(at if follows else 0, publishes=not follows))
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


def _fault_of(line: Line) -> tuple[str, str] | None:
    """Code and reason, where the client is to try again."""
    match line:
        case Lost(reason):
            return "connection", reason
        case Opened(status, body) if status in PASSING:
            return str(status), body
        case Told(None, data) if data != DONE:
            # Not what has become of the request, but that the broker does not answer.
            return "unavailable", data
    return None


def _is_time(planned: Planned, reader: _Reader, line: Line) -> bool:
    """For what this client does in the middle of it."""
    if not reader.intervenes:
        return False
    if isinstance(line, Told) and line.at is not None:
        return line.at >= planned.after_records
    return isinstance(line, UnderWay)
