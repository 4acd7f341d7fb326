"""Clients of a run that use gateways, each of which can serve any request.

A client whose connection breaks, or is silent for a while, resumes through the next gateway: it
sends the request again under the same id, from the event after the last received one. It closes a
silent connection only when it has another, because closing it would cancel the request.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from ops.chaos.clients import http_exchange
from ops.chaos.clients.http_exchange import (
    DONE,
    TRANSIENT_STATUSES,
    ConnectionLost,
    ExchangeItem,
    GatewayClients,
    RequestRunning,
    ResponseStarted,
    ServerEvent,
)
from ops.chaos.gateway_api import RETRY_PAUSE_S, authorization
from ops.chaos.history import Accepted, CancelSent, EventReceived, RequestSent, SessionFailed, now
from ops.chaos.plan import Planned

# Idle gateways send keep-alive comments only every 15 s.
SILENCE_S = 2.5
# An answer that is not streamed is silent until its end.
WHOLE_SILENCE_S = 12.0


@dataclass(slots=True)
class _HttpReader:
    """A reader of one answer from event `next`, over any number of connections."""

    next: int = 0
    publishes: bool = True
    intervenes: bool = False
    ended: bool = False
    left: bool = False
    """The reader has closed its connection. From then on it only follows the log."""
    silent: list["asyncio.Task[None]"] = field(default_factory=list)
    """Silent connections that are still open."""


class HttpClients(GatewayClients):
    """All clients of a run that use gateways."""

    async def run_client(self, planned: Planned, give_up_at: float) -> None:
        """Run one client to the end of its request."""
        async with asyncio.TaskGroup() as group:

            def join(reader: _HttpReader) -> None:
                group.create_task(self._run_reader(planned, reader, give_up_at, None))

            reader = _HttpReader(
                intervenes=planned.behaviour in ("cancel", "resubmit_during", "follow")
            )
            await self._run_reader(planned, reader, give_up_at, join)
        if planned.behaviour == "resubmit_after":
            await self._run_reader(planned, _HttpReader(), give_up_at, None)

    async def _run_reader(
        self,
        planned: Planned,
        reader: _HttpReader,
        give_up_at: float,
        join: Callable[[_HttpReader], None] | None,
    ) -> None:
        self._next_gateway += 1
        number = self._next_gateway
        try:
            while not reader.ended and now() < give_up_at:
                number += 1
                await self._session(planned, number % len(self._gateways), reader, join)
        finally:
            for task in reader.silent:
                task.cancel()

    async def _session(
        self,
        planned: Planned,
        number: int,
        reader: _HttpReader,
        join: Callable[[_HttpReader], None] | None,
    ) -> None:
        """Read over one connection for as long as it lasts."""
        session, began = self._session_of(planned.id), now()
        publishes = reader.publishes and not reader.left
        self._journal.write(RequestSent(began, planned.id, session, reader.next, publishes))
        lines: asyncio.Queue[ExchangeItem] = asyncio.Queue()
        start = http_exchange.submit if publishes else http_exchange.follow
        exchange = asyncio.create_task(start(self._gateways[number], planned, reader.next, lines))
        whole = publishes and not planned.streamed
        polling = (
            self._poll_state(planned, number + 1, lines) if whole and reader.intervenes else None
        )
        try:
            while not reader.ended:
                async with asyncio.timeout(WHOLE_SILENCE_S if whole else SILENCE_S):
                    line = await lines.get()
                if (fault := _transient_failure(line)) is not None:
                    await self._record_failure(planned, session, *fault)
                    return
                if isinstance(line, ResponseStarted):
                    self._record_start(planned, session, reader, line, began if whole else now())
                if isinstance(line, ServerEvent):
                    self._record_event(planned, session, reader, line)
                if _must_intervene(planned, reader, line):
                    at = line.at if isinstance(line, ServerEvent) else None
                    if await self._intervene(planned, number, reader, at or 0, join):
                        return
        except TimeoutError:
            reader.silent.append(exchange)
            await self._record_failure(planned, session, "silence", "no event for a while")
            return
        finally:
            ending = [task for task in (exchange, polling) if task and task not in reader.silent]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _poll_state(
        self, planned: Planned, number: int, lines: asyncio.Queue[ExchangeItem]
    ) -> "asyncio.Task[None]":
        """Poll another gateway until a request without a stream has left its queue."""
        gateway = self._gateways[number % len(self._gateways)]
        return asyncio.create_task(http_exchange.wait_until_running(gateway, planned, lines))

    def _record_start(
        self,
        planned: Planned,
        session: int,
        reader: _HttpReader,
        opened: ResponseStarted,
        accepted: float,
    ) -> None:
        """Record a response; `accepted` is a time no later than the acceptance."""
        if reader.publishes:
            self._journal.write(Accepted(accepted, planned.id, session))
        for task in reader.silent:
            task.cancel()
        if opened.body:
            self._record_event(planned, session, reader, ServerEvent(None, opened.body))
            self._record_event(planned, session, reader, ServerEvent(None, DONE))

    def _record_event(
        self, planned: Planned, session: int, reader: _HttpReader, event: ServerEvent
    ) -> None:
        self._journal.write(EventReceived(now(), planned.id, session, event.at, event.data))
        if event.at is not None:
            reader.next = event.at + 1
        reader.ended |= event.data == DONE

    async def _record_failure(self, planned: Planned, session: int, code: str, reason: str) -> None:
        self._journal.write(SessionFailed(now(), planned.id, session, code, reason))
        await asyncio.sleep(RETRY_PAUSE_S)

    async def _intervene(
        self,
        planned: Planned,
        number: int,
        reader: _HttpReader,
        at: int,
        join: Callable[[_HttpReader], None] | None,
    ) -> bool:
        """Act in the middle of an answer as planned; return whether the connection is closed."""
        reader.intervenes = False
        if planned.behaviour == "cancel" and not planned.durable:
            reader.left = True
            self._journal.write(CancelSent(now(), planned.id, number))
            return True
        if planned.behaviour == "cancel":
            await self._delete(planned, number)
        elif join is not None:
            follows = planned.behaviour == "follow"
            join(_HttpReader(at if follows else 0, publishes=not follows))
        return False

    async def _delete(self, planned: Planned, number: int) -> None:
        """Cancel through another gateway, and if that fails, through the next one."""
        for turn in (1, 2):
            gateway = self._gateways[(number + turn) % len(self._gateways)]
            with contextlib.suppress(httpx.HTTPError):
                headers = authorization(planned.tenant)
                path = f"/v1/requests/{planned.id}"
                answer = await gateway.delete(path, timeout=SILENCE_S, headers=headers)
                if answer.status_code == 202:
                    self._journal.write(CancelSent(now(), planned.id))
                    return


def _transient_failure(line: ExchangeItem) -> tuple[str, str] | None:
    """Return code and reason of a failure after which the client tries again."""
    match line:
        case ConnectionLost(reason):
            return "connection", reason
        case ResponseStarted(status, body) if status in TRANSIENT_STATUSES:
            return str(status), body
        case ServerEvent(None, data) if data != DONE:
            # The gateway reports that the broker does not answer, not an end of the request.
            return "unavailable", data
    return None


def _must_intervene(planned: Planned, reader: _HttpReader, line: ExchangeItem) -> bool:
    """Return whether the client acts at this point of the answer."""
    if not reader.intervenes:
        return False
    if isinstance(line, ServerEvent) and line.at is not None:
        return line.at >= planned.after_records
    return isinstance(line, RequestRunning)
