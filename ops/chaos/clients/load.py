"""The clients of a run, all in one process, which may itself be killed and started again.

Every client sends one request, follows its log, and acts in the middle of it as planned: it
cancels, sends the request again under the same id, or starts a second reader. It writes all that it
receives to the journal. The successor of a killed process reads the journal and continues.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvloop
from cyclopts import App, Parameter

from ops.chaos.batch_files import BatchFolder
from ops.chaos.clients.batches import BatchClients
from ops.chaos.clients.http_clients import HttpClients
from ops.chaos.clients.http_exchange import DONE
from ops.chaos.clients.painted import read_images
from ops.chaos.clients.sound import SpeechClients, read_sound
from ops.chaos.clients.tenants import Peeking, TenantClients
from ops.chaos.gateway_api import RETRY_PAUSE_S
from ops.chaos.history import (
    Accepted,
    CancelSent,
    EventReceived,
    Journal,
    RecordReceived,
    RequestSent,
    SessionFailed,
    SoundEnded,
    SpeechNamed,
    now,
    read_events,
)
from ops.chaos.plan import Planned, Settings, make_request
from shared import client
from shared.bus.bus import Bus
from shared.bus.login import Login, seed_file
from shared.errors import Overloaded, PagemillError
from shared.protocol import subjects
from shared.protocol.permissions import OPERATOR
from shared.protocol.records import LogRecord
from shared.state.log_records import is_final
from shared.telemetry import logs

# A client gives up this long after the deadline; the checker reports the missing end.
PATIENCE_S = 20.0
# The end of an output is stored before the end of its request. A refused request has no output.
OUTPUT_S = 5.0

app = App(name="chaos-load")


class LoadClients:
    """All clients of a run."""

    def __init__(
        self, url: str, gateways: list[str], settings: Settings, file: Path, keys: Path | None
    ) -> None:
        """`keys` is the folder of the keys, for a broker that requires them."""
        self._login = Login(url, OPERATOR, keys and seed_file(keys, OPERATOR))
        self._settings = settings
        self._ends, self._sessions, began = _read_journal(file)
        self._journal = Journal(file)
        self._http = HttpClients(gateways, self._journal, self._new_session)
        self._speeches = SpeechClients(gateways, self._journal, self._new_session)
        self._tenants = TenantClients(url, keys, self._journal, self._new_session)
        self._peeking = Peeking(gateways, settings.tenants, self._journal)
        self._batches = (
            None
            if settings.batches is None
            else BatchClients(
                gateways, settings, settings.batches, BatchFolder(file.parent), self._journal
            )
        )
        self._next_index = 0
        self._began = began or now()

    async def run(self) -> None:
        # As in a gateway, all clients share one connection.
        self._bus = await Bus.connect(self._login, "chaos-load", 30.0)
        self._watch_acceptance(self._bus)
        await self._tenants.connect(self._settings.tenants)
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(self._settings.concurrency):
                    clients.create_task(self._run_clients())
                if self._batches is not None:
                    clients.create_task(self._batches.run(self._bus.connection.nc))
        finally:
            await self._bus.close()
            await self._http.close()
            await self._speeches.close()
            await self._tenants.close()
            await self._peeking.close()
            if self._batches is not None:
                await self._batches.close()

    def _watch_acceptance(self, bus: Any) -> None:
        publish = bus.publish_without_id

        async def watched(subject: str, *others: Any, **named: Any) -> None:
            await publish(subject, *others, **named)
            if subjects.is_request(subject):
                name = subjects.last_token(subject)
                self._journal.write(Accepted(now(), name, self._sessions.get(name, 0)))

        bus.publish_without_id = watched

    async def _run_clients(self) -> None:
        """Run one client after the other, each at its scheduled time or later."""
        while self._next_index < self._settings.requests:
            index, self._next_index = self._next_index, self._next_index + 1
            planned = make_request(self._settings, index)
            again = planned.behaviour == "resubmit_after" and not (planned.http and planned.speaks)
            num_ends = 2 if again else 1
            if self._ends[planned.id] >= num_ends:
                continue
            await asyncio.sleep(self._began + index / self._settings.rate - now())
            await self._run_client(planned)

    async def _run_client(self, planned: Planned) -> None:
        give_up = now() + planned.timeout_s + PATIENCE_S
        if planned.http:
            clients = self._speeches if planned.speaks else self._http
            await clients.run_client(planned, give_up)
            await self._peeking.look(planned)
            return
        if planned.tenant:
            await self._tenants.run_client(planned, give_up)
            return
        readers: list[asyncio.Task[bool]] = []
        while not await self._session(planned, readers) and now() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_PAUSE_S)
        for task in readers:
            while not await task and now() < give_up:
                task = asyncio.create_task(self._session(planned, None))
        if planned.behaviour == "resubmit_after":
            await self._session(planned, None)

    async def _session(
        self, planned: Planned, readers: list[asyncio.Task[bool]] | None, start: int | None = None
    ) -> bool:
        """Send the request, or follow its log from `start`; return whether the end was reached.

        A client that acts adds more sessions to `readers`; without a list it does not act.
        """
        session = self._new_session(planned.id)
        publishes = start is None
        self._journal.write(RequestSent(now(), planned.id, session, start or 0, publishes))
        output = self._read_output(planned, session, readers)
        try:
            async with asyncio.timeout(planned.timeout_s + PATIENCE_S):
                async for record in self._records(planned, session, start):
                    if output is not None and is_final(record):
                        # An answer has ended when its sound or its images have ended, too.
                        await asyncio.wait([output], timeout=OUTPUT_S)
                    self._journal.write(RecordReceived(now(), planned.id, session, record))
                    acts = record.index == planned.after_records and not is_final(record)
                    if readers is not None and acts:
                        await self._intervene(planned, readers)
        except PagemillError as error:
            self._journal.write(
                SessionFailed(now(), planned.id, session, error.code, error.message)
            )
            if isinstance(error, Overloaded):
                await asyncio.sleep(error.retry_after_s or 1.0)
            return False
        except TimeoutError:
            self._journal.write(
                SessionFailed(now(), planned.id, session, "silence", "no final record")
            )
            return False
        finally:
            if output is not None:
                output.cancel()
                await asyncio.gather(output, return_exceptions=True)
        return True

    def _read_output(
        self, planned: Planned, session: int, readers: list[asyncio.Task[bool]] | None
    ) -> asyncio.Task[None] | None:
        """Read the sound or the images of a request. A client that gets no text acts meanwhile."""
        if not (planned.speaks or planned.paints):
            return None
        read = read_images if planned.paints else read_sound

        async def act(number: int) -> None:
            has_no_text = planned.paints or planned.request.given_text is not None
            if has_no_text and readers is not None and number == planned.after_records:
                await self._intervene(planned, readers)

        return asyncio.create_task(read(self._bus, planned, session, self._journal, act))

    def _new_session(self, id: str) -> int:
        self._sessions[id] = session = self._sessions.get(id, 0) + 1
        return session

    def _records(
        self, planned: Planned, session: int, start: int | None
    ) -> AsyncIterator[LogRecord]:
        if start is None:
            # After the death of its process, a client knows that it may have asked before.
            is_repeated = session > 1
            return client.ask(self._bus, planned.request, planned.id, is_repeated=is_repeated)
        return client.follow(self._bus, planned.id, start)

    async def _intervene(self, planned: Planned, readers: list[asyncio.Task[bool]]) -> None:
        """Act in the middle of an answer as planned."""
        if planned.behaviour == "cancel":
            await client.cancel(self._bus, planned.id)
            self._journal.write(CancelSent(now(), planned.id))
        elif planned.behaviour == "resubmit_during":
            readers.append(asyncio.create_task(self._session(planned, None)))
        elif planned.behaviour == "follow":
            has_text = not (planned.paints or planned.request.given_text)
            start = planned.after_records if has_text else 0
            readers.append(asyncio.create_task(self._session(planned, None, start)))


def _read_journal(file: Path) -> tuple[Counter[str], dict[str, int], float | None]:
    """Read the journal of killed predecessors: ends and sessions by request, and the start time."""
    began: float | None = None
    ends: Counter[str] = Counter()
    sessions: dict[str, int] = {}
    through_gateways: set[str] = set()
    for event in read_events(file):
        began = event.t if began is None else began
        if isinstance(event, RequestSent):
            sessions[event.id] = event.session
        elif isinstance(event, SpeechNamed):
            through_gateways.add(event.id)
        elif isinstance(event, SoundEnded):
            # Other requests end with their own log.
            ends[event.id] += event.id in through_gateways
        elif (isinstance(event, RecordReceived) and is_final(event.record)) or (
            isinstance(event, EventReceived) and event.data == DONE
        ):
            ends[event.id] += 1
    return ends, sessions, began


@app.default
def main(
    *,
    settings: Path,
    out: Path,
    nats: Annotated[str, Parameter(name="--nats")],
    keys: Path | None = None,
    gateway: list[str] | None = None,
) -> int:
    """Run the clients of a run until all of their requests have ended."""
    logs.configure_logging("error", role="load")
    decoded = msgspec.json.decode(settings.read_bytes(), type=Settings)
    load = LoadClients(nats, gateway or [], decoded, out, keys)
    uvloop.run(load.run())
    return 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
