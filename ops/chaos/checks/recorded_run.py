"""A run as it was recorded: events of clients, workers and processes, arranged for the checks."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ops.chaos.clients.http_exchange import DONE
from ops.chaos.expected_answers import Expected
from ops.chaos.history import (
    Accepted,
    AnyEvent,
    Asked,
    AskedToCancel,
    Broke,
    Did,
    Ended,
    Fault,
    Final,
    Got,
    Ready,
    Saw,
)
from ops.chaos.plan import Planned, Settings
from shared.state.token_log import is_final

# What a coordinator had in hand comes to another after their ack wait of a second.
TAKES_WORK_S = 1.2
# What a stopped worker has asked for is sent to it, again and again after the ack wait, until its
# pull requests have expired.
STOPPED_PULLS_S = 6.0
# A leader is the server of a cluster that has to agree to every write of a stream.
BROKER_ROLES = ("broker", "leader")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long things may take, from the design's fault matrix; seconds and MiB."""

    after_deadline_s: float = 2.0
    after_cancel_s: float = 2.0
    recovery_s: float = 5.0
    broker_recovery_s: float = 3.0
    refusal_s: float = 1.0
    rss_mib: dict[str, float] = field(default_factory=dict)
    """By role; none for a role that is not there."""


@dataclass(frozen=True, slots=True)
class Session:
    """What one reader of one log has seen."""

    asked: Asked
    got: list[Got] = field(default_factory=list)

    @property
    def final(self) -> Got | None:
        return self.got[-1] if self.got and is_final(self.got[-1].record) else None


@dataclass(frozen=True, slots=True)
class Reading:
    """What came over one connection to a gateway."""

    asked: Asked
    saw: list[Saw] = field(default_factory=list)

    @property
    def ended(self) -> float | None:
        return self.saw[-1].t if self.saw and self.saw[-1].data == DONE else None


@dataclass
class Run:
    settings: Settings
    planned: dict[str, Planned]
    expected: dict[str, Expected]
    clients: list[AnyEvent]
    pool: list[AnyEvent]
    workers: list[AnyEvent]
    final: Final
    bounds: Bounds = field(default_factory=Bounds)

    @cached_property
    def sessions(self) -> dict[str, list[Session]]:
        """By request, in the order in which they began."""
        found: dict[str, dict[int, Session]] = defaultdict(dict)
        for event in self.clients:
            if isinstance(event, Asked):
                found[event.id][event.session] = Session(event)
            elif isinstance(event, Got) and event.session in found[event.id]:
                found[event.id][event.session].got.append(event)
        return {id: list(by_number.values()) for id, by_number in found.items()}

    @cached_property
    def readings(self) -> dict[str, list[Reading]]:
        """By request, in the order in which they began."""
        found: dict[str, dict[int, Reading]] = defaultdict(dict)
        for event in self.clients:
            if isinstance(event, Asked) and self.planned[event.id].http:
                found[event.id][event.session] = Reading(event)
            elif isinstance(event, Saw):
                found[event.id][event.session].saw.append(event)
        return {id: list(by_number.values()) for id, by_number in found.items()}

    @cached_property
    def accepted(self) -> dict[str, float]:
        """When each request was accepted for the first time."""
        found: dict[str, float] = {}
        for event in self.clients:
            if isinstance(event, Accepted):
                found.setdefault(event.id, event.t)
        return found

    @cached_property
    def broken(self) -> dict[str, list[Broke]]:
        found: dict[str, list[Broke]] = defaultdict(list)
        for event in self.clients:
            if isinstance(event, Broke):
                found[event.id].append(event)
        return found

    @cached_property
    def harmed(self) -> Counter[str]:
        """How often each request did its harm."""
        return Counter(event.id for event in self.did if event.what == "harm")

    @cached_property
    def cancelled(self) -> dict[str, AskedToCancel]:
        return {event.id: event for event in self.clients if isinstance(event, AskedToCancel)}

    @cached_property
    def ended(self) -> dict[str, float]:
        """When a client first saw the final record of each request."""
        found: dict[str, float] = {}
        for id, sessions in self.sessions.items():
            finals = [session.final.t for session in sessions if session.final is not None]
            ends = (reading.ended for reading in self.readings.get(id, []))
            finals += [end for end in ends if end is not None]
            if finals:
                found[id] = min(finals)
        return found

    @cached_property
    def outages(self) -> list[tuple[float, float]]:
        """When it could not be expected that a request ends: no broker to write to, no coordinator
        to do it, or what is to be done is in the hand of one that is gone."""
        found = self._broker_outages() + self._absences("coordinator")
        for event in self.pool:
            if isinstance(event, Ended) and event.role == "coordinator":
                found.append((event.t, event.t + TAKES_WORK_S))
            elif isinstance(event, Fault) and (event.kind, event.role) == ("stop", "coordinator"):
                found.append((event.t, event.t + STOPPED_PULLS_S))
        return sorted(found)

    def _broker_outages(self) -> list[tuple[float, float]]:
        """From the fault to when it was there again, and what clients need to find it."""
        found = []
        readies = [e.t for e in self.pool if isinstance(e, Ready) and e.role == "broker"]
        for event in self.pool:
            if isinstance(event, Fault) and event.role in BROKER_ROLES:
                back = next((t for t in readies if t > event.t), event.t)
                found.append((event.t, back + self.bounds.broker_recovery_s))
        return found

    def _absences(self, role: str) -> list[tuple[float, float]]:
        """When none of a role was up; it takes work when it has announced itself."""
        found = []
        up: set[int] = set()
        left = None
        for event in self.pool:
            if not isinstance(event, Ready | Fault | Ended) or event.role != role:
                continue
            if isinstance(event, Ready):
                up.add(event.number)
                if left is not None:
                    found.append((left, event.t + TAKES_WORK_S))
                    left = None
            elif event.number in up:
                up.discard(event.number)
                left = event.t if not up else None
        return found

    def gateway_failed(self, number: int, start: float, stop: float) -> bool:
        """Whether a gateway was hurt, or away, at any time of [start, stop]."""
        events = [
            (event.t, isinstance(event, Ready))
            for event in self.pool
            if isinstance(event, Ready | Fault)
            and (event.role, event.number) == ("gateway", number)
        ]
        before = [ready for t, ready in events if t < start]
        return before[-1:] == [False] or any(start <= t <= stop for t, ready in events if not ready)

    def outage_within(self, start: float, stop: float) -> float:
        """Seconds of [start, stop] that were outages; where they overlap they count once."""
        total, reached = 0.0, start
        for began, back in self.outages:
            total += max(0.0, min(stop, back) - max(reached, began))
            reached = max(reached, min(stop, back))
        return total

    @property
    def did(self) -> Iterator[Did]:
        return (event for event in self.workers if isinstance(event, Did))
