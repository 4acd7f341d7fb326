"""Clients of tenants on the bus, with the tenants' keys and a stock library.

They follow the live log. After a lost connection they read the last record, which says how the
request ended. The broker gives them no other part of an old log.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from ops.chaos.batch_plan import is_of_batches
from ops.chaos.gateway_api import RETRY_PAUSE_S, authorization
from ops.chaos.history import (
    Accepted,
    CancelSent,
    Journal,
    Overheard,
    Peeked,
    RecordReceived,
    RequestSent,
    SessionFailed,
    now,
)
from ops.chaos.plan import Planned
from ops.chaos.processes.cluster import ignore_error
from shared.protocol import subjects
from shared.protocol.records import LogRecord
from shared.protocol.requests import encode_request
from shared.state.log_records import decode_record, is_final
from workers.keyring import Keyring

SILENCE_S = 1.0
REPLY_S = 2.0
PEEK_S = 5.0
_LAST = f"$JS.API.DIRECT.GET.{subjects.TOKENS_STREAM}"


class _Refusal(msgspec.Struct):
    description: str = ""


class _Stored(msgspec.Struct):
    """The broker's answer to a message that was published for a stream."""

    error: _Refusal | None = None

    @property
    def is_there(self) -> bool:
        """Whether the message is stored, perhaps since an earlier attempt."""
        return self.error is None or "per subject" in self.error.description


class _Reader(NamedTuple):
    """Progress of a client in its log in the current session."""

    session: int
    next: int
    num_reconnects: int | None
    """Reconnects of the connection when its last record came; None if some may be missing."""


class TenantClients:
    """Clients of all tenants: one connection each, which also subscribes to all permitted logs."""

    def __init__(
        self, url: str, keys: Path | None, journal: Journal, session_of: Callable[[str], int]
    ) -> None:
        """`keys` is the folder of `pagemill keys`.

        `session_of` returns the number of a new session of a request.
        """
        self._url = url
        self._keys = keys
        self._journal = journal
        self._session_of = session_of
        self._connections: dict[str, Client] = {}

    async def connect(self, tenants: tuple[str, ...]) -> None:
        for tenant in tenants:
            assert self._keys is not None
            seed = Keyring(self._keys).file_of_tenant(tenant)
            self._connections[tenant] = nc = await _connect(self._url, seed)
            await nc.subscribe("pm.tokens.>", cb=self._listener(tenant))

    def _listener(self, tenant: str) -> Callable[[Msg], Awaitable[None]]:
        async def listen(msg: Msg) -> None:
            record = decode_record(msg.data)
            id = msg.subject.split(".")[2]
            # Batches have thousands of lines, so the first record of each is enough.
            if isinstance(record, LogRecord) and not (record.index and is_of_batches(id)):
                self._journal.write(Overheard(now(), tenant, id, record))

        return listen

    async def close(self) -> None:
        for nc in self._connections.values():
            await nc.close()

    async def run_client(self, planned: Planned, give_up_at: float) -> None:
        """Run one client to the end of its request."""
        for _ in range(2 if planned.behaviour == "resubmit_after" else 1):
            session = self._session_of(planned.id)
            self._journal.write(RequestSent(now(), planned.id, session, 0, True))
            if not await self._read(planned, session, give_up_at):
                reason = "no final record"
                self._journal.write(SessionFailed(now(), planned.id, session, "silence", reason))

    async def _read(self, planned: Planned, session: int, give_up_at: float) -> bool:
        """Publish the request and read its log; return whether its end was seen."""
        nc = self._connections[planned.tenant]
        live = await nc.subscribe(subjects.tokens(planned.id))
        cancels = planned.behaviour == "cancel"
        try:
            subject = subjects.request(planned.request.model, planned.id)
            attempts = await self._publish(nc, subject, encode_request(planned.request))
            self._journal.write(Accepted(now(), planned.id, session))
            # A client that was killed has other sessions than this process knows.
            may_have_records = session > 1 or attempts > 1
            reader = _Reader(session, 0, None if may_have_records else nc.stats["reconnects"])
            while now() < give_up_at:
                record = await _next_record(nc, live, planned.id)
                if record is None:
                    continue
                reader = self._note(planned, reader, record, nc.stats["reconnects"])
                if is_final(record):
                    return True
                if cancels and record.index >= planned.after_records:
                    cancels = False
                    await self._publish(nc, subjects.cancel(planned.id), b"")
                    self._journal.write(CancelSent(now(), planned.id))
        finally:
            if nc.is_connected:
                await live.unsubscribe()
        return False

    def _note(
        self, planned: Planned, reader: _Reader, record: LogRecord, num_reconnects: int
    ) -> _Reader:
        """Note a record, in a new session if records before it may have been missed."""
        session = reader.session
        if record.index > reader.next and reader.num_reconnects != num_reconnects:
            session = self._session_of(planned.id)
            self._journal.write(RequestSent(now(), planned.id, session, record.index, False))
        self._journal.write(RecordReceived(now(), planned.id, session, record))
        return _Reader(session, record.index + 1, num_reconnects)

    async def _publish(self, nc: Client, subject: str, data: bytes) -> int:
        """Publish until the broker has stored it; return the number of attempts."""
        for attempt in itertools.count(1):
            if attempt > 1:
                await asyncio.sleep(RETRY_PAUSE_S)
            try:
                answer = await nc.request(subject, data, timeout=REPLY_S)
                stored = msgspec.json.decode(answer.data, type=_Stored)
            except (NatsError, msgspec.DecodeError):
                continue
            if stored.is_there:
                return attempt
        raise AssertionError("a count has no end")


async def _connect(url: str, seed: Path) -> Client:
    return await nats.connect(
        url,
        nkeys_seed=str(seed),
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.1,
        ping_interval=2,
        error_cb=ignore_error,
    )


async def _next_record(nc: Client, live: Subscription, id: str) -> LogRecord | None:
    """Return the next live record; after a silence the final one, if the log has it."""
    try:
        record = decode_record((await live.next_msg(SILENCE_S)).data)
        return record if isinstance(record, LogRecord) else None
    except NatsTimeoutError:
        pass
    try:
        last = await nc.request(f"{_LAST}.{subjects.tokens(id)}", timeout=REPLY_S)
    except NatsError:
        return None
    record = decode_record(last.data)
    return record if isinstance(record, LogRecord) and is_final(record) else None


class Peeking:
    """Clients that try to read the requests of other tenants from gateways."""

    def __init__(self, gateways: list[str], tenants: tuple[str, ...], journal: Journal) -> None:
        self._gateways = itertools.cycle(gateways)
        self._tenants = tenants
        self._journal = journal
        self._http = httpx.AsyncClient(timeout=PEEK_S, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def look(self, planned: Planned) -> None:
        """Request the state and the answer of a request with the keys of all other tenants."""
        for tenant in self._tenants:
            if tenant == planned.tenant:
                continue
            for path in (f"/v1/requests/{planned.bus_id}", f"/v1/requests/{planned.bus_id}/stream"):
                status = await self._ask(path, authorization(tenant))
                if status is not None:
                    self._journal.write(Peeked(now(), tenant, planned.id, status))

    async def _ask(self, path: str, headers: Mapping[str, str]) -> int | None:
        """Return the status of an answer; None without one."""
        try:
            url = f"{next(self._gateways)}{path}"
            async with self._http.stream("GET", url, headers=dict(headers)) as answer:
                return answer.status_code
        except httpx.HTTPError:
            return None
