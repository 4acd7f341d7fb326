"""What the processes of a run write down as it happens, and what is read of it afterwards.

Every process appends to a file of its own, one JSON object a line, each with one system call: a
line is there as soon as it is written, however the process ends. Times are of CLOCK_MONOTONIC,
which all processes of a machine share.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.protocol.messages import DeadLetter, Heartbeat, LogRecord

now = time.monotonic


class Event(Struct, frozen=True, tag=True):
    t: float


# -- a client ---------------------------------------------------------------------------------


class Asked(Event, frozen=True):
    """A session of a client begins: it has (re)published the request, or only follows its log."""

    id: str
    session: int
    start: int
    """Index of the first record that it wants."""
    publishes: bool


class Accepted(Event, frozen=True):
    id: str
    session: int
    known: bool
    """The broker had a request of this id already."""


class Got(Event, frozen=True):
    id: str
    session: int
    record: LogRecord


class Broke(Event, frozen=True):
    """A session ended without a final record; the client was told why."""

    id: str
    session: int
    code: str
    reason: str


class Saw(Event, frozen=True):
    """An event of an answer over HTTP, or an error in its place."""

    id: str
    session: int
    at: int | None
    """The event's id: the index of its record. None for the end mark, and for an error that came as
    a status."""
    data: str


class AskedToCancel(Event, frozen=True):
    """The cancellation is stored from `t` on; or the connection to a gateway was closed then."""

    id: str
    gateway: int | None = None


# -- the pool ---------------------------------------------------------------------------------


class Fault(Event, frozen=True):
    kind: str
    role: str
    number: int
    pid: int


class Started(Event, frozen=True):
    role: str
    number: int
    pid: int


class Ready(Event, frozen=True):
    role: str
    number: int
    pid: int
    after_s: float
    """Since it was started."""


class Ended(Event, frozen=True):
    role: str
    number: int
    pid: int
    code: int
    meant: bool
    """The pool had sent it the signal that it died of, or asked it to drain."""


class Memory(Event, frozen=True):
    role: str
    pid: int
    rss_mib: float


# -- a worker ---------------------------------------------------------------------------------


class Did(Event, frozen=True):
    """A step of a worker on a request; `at` counts what the step says: records, attempts."""

    what: str
    id: str = ""
    at: int = 0


class Snapshot(Event, frozen=True):
    """What a process holds; taken when nothing is asked of it."""

    role: str
    pid: int
    fds: int
    """Without those of `peers`, of their mappings, and of `readers`."""
    memfds: int
    """Without those of the mappings of others."""
    threads: int
    tasks: int
    """Without those that serve `readers`."""
    subscriptions: int
    mappings: int = 0
    """Of arenas: its own, and those of others."""
    peers: list[str] = []
    """Addresses of the arenas to which it has a connection."""
    readers: int = 0
    """Connections of others to its own arena."""


AnyEvent = (
    Asked
    | Accepted
    | Got
    | Saw
    | Broke
    | AskedToCancel
    | Fault
    | Started
    | Ready
    | Ended
    | Memory
    | Did
    | Snapshot
)
_decode = msgspec.json.Decoder(AnyEvent).decode
_encode = msgspec.json.Encoder().encode


class Journal:
    """An append-only file of events."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: Event) -> None:
        os.write(self._fd, _encode(event) + b"\n")


def read_events(path: Path) -> Iterator[AnyEvent]:
    """In the order of writing; a last line that was cut off with its writer is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield _decode(line)


# -- the end ----------------------------------------------------------------------------------


class Final(Struct, frozen=True):
    """What is left when all clients have gone and the system has come to rest."""

    settled: bool
    """It did come to rest in the time that it was given."""
    logs: dict[str, list[LogRecord]]
    letters: list[DeadLetter]
    messages: dict[str, int]
    """By stream: how many it holds."""
    left: list[str]
    """The ids of requests that are in a queue still."""
    consumers: dict[str, int]
    """By stream, at the end."""
    consumers_before: dict[str, int]
    beats: list[Heartbeat]
    before: list[Snapshot]
    """Of processes that were ready and had had nothing or little to do."""
    after: list[Snapshot]
    shm_before: list[str]
    shm_after: list[str]
    sockets: list[str] = []
    """Addresses of all arenas of this machine at which somebody listens or is connected."""
    notes: list[str] = []
    """The ids of requests of which gateways have a note."""
    temp_files: list[str] = []
    """What workers have left in the folder for such."""
