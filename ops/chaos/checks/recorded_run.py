"""A run as it was recorded: events of clients, workers and processes, arranged for the checks."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ops.chaos.batch_files import ReceivedBatch, Single
from ops.chaos.clients.http_exchange import DONE
from ops.chaos.expected_answers import Expected
from ops.chaos.expected_speech import ExpectedSpeech
from ops.chaos.history import (
    Accepted,
    CancelSent,
    Event,
    EventReceived,
    Fault,
    FinalState,
    ProcessExited,
    Ready,
    RecordReceived,
    RequestSent,
    SessionFailed,
    WorkerEvent,
)
from ops.chaos.plan import Planned, Settings
from shared.state.log_records import is_final

# Tasks of a dead coordinator are redelivered to another after their ack wait of a second.
REDELIVERY_S = 1.2
# The broker delivers to the pull requests of a stopped worker, and again after each ack wait, until
# the pull requests have expired.
STOPPED_PULLS_S = 6.0
# A leader is the member of a cluster that must agree to every write of a stream.
BROKER_ROLES = ("broker", "leader")


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    invariant: str
    subject: str
    """Id of a request, or name of a process."""
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.text}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the invariants, from the design's fault matrix; seconds and MiB."""

    after_deadline_s: float = 2.0
    after_cancel_s: float = 2.0
    recovery_s: float = 5.0
    broker_recovery_s: float = 3.0
    refusal_s: float = 1.0
    rss_mib: dict[str, float] = field(default_factory=dict)
    """Memory bound by role; a role without an entry is not checked."""
    foreign_peers: int = 0
    """Connections of an engine to its other ranks."""


@dataclass(frozen=True, slots=True)
class Session:
    """One reader's view of one token log."""

    opened: RequestSent
    received: list[RecordReceived] = field(default_factory=list)

    @property
    def final(self) -> RecordReceived | None:
        return self.received[-1] if self.received and is_final(self.received[-1].record) else None


@dataclass(frozen=True, slots=True)
class HttpSession:
    """The events of one answer that came over one connection to a gateway."""

    opened: RequestSent
    events: list[EventReceived] = field(default_factory=list)

    @property
    def ended(self) -> float | None:
        return self.events[-1].t if self.events and self.events[-1].data == DONE else None


@dataclass
class RecordedRun:
    """A plan, the events of all processes, and the state after the run."""

    settings: Settings
    planned: dict[str, Planned]
    expected: dict[str, Expected]
    clients: list[Event]
    pool: list[Event]
    workers: list[Event]
    """Events of all workers."""
    final: FinalState
    bounds: Bounds = field(default_factory=Bounds)
    speeches: dict[str, ExpectedSpeech] = field(default_factory=dict)
    """Expected speeches of the requests that are spoken."""
    processes: dict[tuple[str, int], list[Event]] = field(default_factory=dict)
    """Events of each worker, by role and process id."""
    images: dict[str, list[str]] = field(default_factory=dict)
    """SHA-256 of the files of painted images."""
    batches: list[ReceivedBatch] = field(default_factory=list)
    singles: dict[str, Single] = field(default_factory=dict)
    """Answers to the bodies of lines that were sent alone, by `key_of`."""

    @cached_property
    def sessions(self) -> dict[str, list[Session]]:
        """Sessions over NATS by request, in the order in which they began."""
        by_request: dict[str, dict[int, Session]] = defaultdict(dict)
        for event in self.clients:
            if isinstance(event, RequestSent):
                by_request[event.id][event.session] = Session(event)
            elif isinstance(event, RecordReceived) and event.session in by_request[event.id]:
                by_request[event.id][event.session].received.append(event)
        return {id: list(by_number.values()) for id, by_number in by_request.items()}

    @cached_property
    def http_sessions(self) -> dict[str, list[HttpSession]]:
        """Sessions over HTTP by request, in the order in which they began."""
        over_chat = {entry.id for entry in self.planned.values() if entry.http and not entry.speaks}
        by_request: dict[str, dict[int, HttpSession]] = defaultdict(dict)
        for event in self.clients:
            if isinstance(event, RequestSent) and event.id in over_chat:
                by_request[event.id][event.session] = HttpSession(event)
            elif isinstance(event, EventReceived):
                by_request[event.id][event.session].events.append(event)
        return {id: list(by_number.values()) for id, by_number in by_request.items()}

    @cached_property
    def accepted(self) -> dict[str, float]:
        """Time at which each request was accepted first."""
        times: dict[str, float] = {}
        for event in self.clients:
            if isinstance(event, Accepted):
                times.setdefault(event.id, event.t)
        return times

    @cached_property
    def session_failures(self) -> dict[str, list[SessionFailed]]:
        failures: dict[str, list[SessionFailed]] = defaultdict(list)
        for event in self.clients:
            if isinstance(event, SessionFailed):
                failures[event.id].append(event)
        return failures

    @cached_property
    def harmed(self) -> Counter[str]:
        """Number of times that each request did harm."""
        return Counter(event.id for event in self.did if event.step == "harm")

    @cached_property
    def cancelled(self) -> dict[str, CancelSent]:
        return {event.id: event for event in self.clients if isinstance(event, CancelSent)}

    @cached_property
    def ends(self) -> dict[str, tuple[float, float]]:
        """Time at which a session first saw the final record of a request, and when it opened."""
        times: dict[str, tuple[float, float]] = {}
        for id, sessions in self.sessions.items():
            ends = [(each.final.t, each.opened.t) for each in sessions if each.final is not None]
            over_http = self.http_sessions.get(id, [])
            ends += [(each.ended, each.opened.t) for each in over_http if each.ended is not None]
            if ends:
                times[id] = min(ends)
        return times

    @cached_property
    def ended(self) -> dict[str, float]:
        """Time at which a client first saw the final record of each request."""
        return {id: ended for id, (ended, _) in self.ends.items()}

    @cached_property
    def outages(self) -> list[tuple[float, float]]:
        """Intervals in which a request cannot be expected to end.

        There is no broker to write to, or no coordinator, or a dead coordinator holds the task.
        """
        intervals = self._broker_outages() + self._absences("coordinator")
        for event in self.pool:
            if isinstance(event, ProcessExited) and event.role == "coordinator":
                intervals.append((event.t, event.t + REDELIVERY_S))
            elif isinstance(event, Fault) and (event.kind, event.role) == ("stop", "coordinator"):
                intervals.append((event.t, event.t + STOPPED_PULLS_S))
        return sorted(intervals)

    def _broker_outages(self) -> list[tuple[float, float]]:
        """Intervals from a fault until the broker was back and clients had time to reconnect."""
        intervals = []
        readies = [e.t for e in self.pool if isinstance(e, Ready) and e.role == "broker"]
        for event in self.pool:
            if isinstance(event, Fault) and event.role in BROKER_ROLES:
                back = next((t for t in readies if t > event.t), event.t)
                intervals.append((event.t, back + self.bounds.broker_recovery_s))
        return intervals

    def _absences(self, role: str) -> list[tuple[float, float]]:
        """Intervals without any worker of a role; a worker counts once it has announced itself."""
        intervals = []
        up: set[int] = set()
        left = None
        for event in self.pool:
            if not isinstance(event, Ready | Fault | ProcessExited) or event.role != role:
                continue
            if isinstance(event, Ready):
                up.add(event.number)
                if left is not None:
                    intervals.append((left, event.t + REDELIVERY_S))
                    left = None
            elif event.number in up:
                up.discard(event.number)
                left = event.t if not up else None
        return intervals

    def gateway_failed(self, number: int, start: float, stop: float) -> bool:
        """Return whether a gateway met a fault or was down at any time of [start, stop]."""
        events = [
            (event.t, isinstance(event, Ready))
            for event in self.pool
            if isinstance(event, Ready | Fault)
            and (event.role, event.number) == ("gateway", number)
        ]
        before = [ready for t, ready in events if t < start]
        return before[-1:] == [False] or any(start <= t <= stop for t, ready in events if not ready)

    def outage_within(
        self, start: float, stop: float, more: Iterable[tuple[float, float]] = ()
    ) -> float:
        """Return the seconds of [start, stop] that were outages; overlaps count once.

        `more` has outages in addition to `outages`.
        """
        total, reached = 0.0, start
        for began, back in sorted([*self.outages, *more]):
            total += max(0.0, min(stop, back) - max(reached, began))
            reached = max(reached, min(stop, back))
        return total

    @property
    def did(self) -> Iterator[WorkerEvent]:
        return (event for event in self.workers if isinstance(event, WorkerEvent))
