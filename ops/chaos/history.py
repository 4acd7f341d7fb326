"""The events that the processes of a run write to their journals, and the state after the run.

Every process appends to a separate file, one JSON object per line, each with one system call. A
line is therefore complete as soon as it is written, however the process ends. Times are readings of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

import functools
import hashlib
import operator
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.protocol.messages import DeadLetter, Heartbeat
from shared.protocol.records import LogRecord, OutputEnds, OutputRecord

now = time.monotonic


class Event(Struct, frozen=True, tag=True):
    """Base of all events; `t` is the time in seconds."""

    t: float


# -- a client ---------------------------------------------------------------------------------


class RequestSent(Event, frozen=True):
    """A session of a client began: it publishes the request (again), or only follows its log."""

    id: str
    session: int
    start: int
    """Index of the first record that the session reads."""
    publishes: bool


class Accepted(Event, frozen=True):
    """The broker acknowledged the request."""

    id: str
    session: int


class RecordReceived(Event, frozen=True):
    """A record of a token log reached a client."""

    id: str
    session: int
    record: LogRecord


class SessionFailed(Event, frozen=True):
    """A session ended without a final record, for the reason given."""

    id: str
    session: int
    code: str
    reason: str


class EventReceived(Event, frozen=True):
    """An event of an answer over HTTP, or an error in place of an answer, reached a client."""

    id: str
    session: int
    at: int | None
    """Id of the event, which is the index of its record; None for the end mark, and for an error
    with an HTTP status."""
    data: str


class CancelSent(Event, frozen=True):
    """A cancellation was stored, or a client closed its connection to cancel."""

    id: str
    gateway: int | None = None
    """Number of the gateway at the other end of the closed connection."""


class SoundReceived(Event, frozen=True):
    """Samples of a speech reached a client."""

    id: str
    session: int
    at: int
    """Index of their first byte in the sound."""
    num_bytes: int
    digest: str


class SoundEnded(Event, frozen=True):
    """A client received the end of a sound."""

    id: str
    session: int
    cut: bool


class ImageReceived(Event, frozen=True):
    """The file of a painted image reached a client."""

    id: str
    session: int
    number: int
    digest: str
    """SHA-256 of the file."""


class Overheard(Event, frozen=True):
    """A client that subscribes to all permitted logs received a record of a token log."""

    tenant: str
    id: str
    """Id of the request as its client named it."""
    record: LogRecord


class Peeked(Event, frozen=True):
    """A client tried to read a request of another tenant from a gateway."""

    tenant: str
    id: str
    status: int


class SpeechNamed(Event, frozen=True):
    """A client received the id under which a gateway published its speech."""

    id: str
    session: int
    bus_id: str


class BatchCreated(Event, frozen=True):
    """A gateway accepted a batch of the plan."""

    name: str


class BatchCancelSent(Event, frozen=True):
    """A gateway accepted the cancellation of a batch."""

    name: str


class BatchEnded(Event, frozen=True):
    """A client saw that a batch has ended."""

    name: str


class BatchDrained(Event, frozen=True):
    """A client saw that no queue has a request of a batch that has ended."""

    name: str


# -- the pool ---------------------------------------------------------------------------------


class Fault(Event, frozen=True):
    """A fault was injected into a process."""

    kind: str
    role: str
    number: int
    pid: int


class Started(Event, frozen=True):
    """The pool started a process."""

    role: str
    number: int
    pid: int


class Ready(Event, frozen=True):
    """A worker announced itself, or a broker accepts connections again."""

    role: str
    number: int
    pid: int
    after_s: float
    """Time since the start of the process."""


class ProcessExited(Event, frozen=True):
    """A process ended."""

    role: str
    number: int
    pid: int
    code: int
    expected_exit: bool
    """The pool had sent the process a signal to end or to drain."""


class Drained(Event, frozen=True):
    """The actuator of a scaled pool sent a worker the signal to end, as the plan requires."""

    role: str
    number: int
    pid: int


class MemorySample(Event, frozen=True):
    """The resident memory of a process at one time."""

    role: str
    pid: int
    rss_mib: float


# -- a worker ---------------------------------------------------------------------------------


class WorkerEvent(Event, frozen=True):
    """A step of a worker.

    The meaning of `id` and `at` depends on the step: a request id and an attempt, a key and a
    process id, a number of bytes.
    """

    step: str
    id: str = ""
    at: int = 0


class Snapshot(Event, frozen=True):
    """The resources that a process holds while the system is at rest."""

    role: str
    pid: int
    fds: int
    """File descriptors, without the descriptors of `peers`, their mappings, and `readers`."""
    memfds: int
    """Memory files, without the mapped ones of other workers."""
    threads: int
    tasks: int
    """Asyncio tasks, without those that serve `readers`."""
    subscriptions: int
    mappings: int = 0
    """Mapped arenas: the worker's own, and other workers' arenas."""
    peers: list[str] = []
    """Addresses of the arenas to which the worker is connected."""
    readers: int = 0
    """Connections of other workers to its own arena."""
    task_names: list[str] = []
    """Functions that the asyncio tasks run."""


_EVENTS: Any = functools.reduce(operator.or_, Event.__subclasses__())
_decode = msgspec.json.Decoder(_EVENTS).decode
_encode = msgspec.json.Encoder().encode


def digest_of(sound: bytes) -> str:
    return hashlib.blake2b(sound, digest_size=8).hexdigest()


class Journal:
    """An append-only file of events."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: Event) -> None:
        os.write(self._fd, _encode(event) + b"\n")


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a journal in order, without an unfinished last line."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield _decode(line)


# -- the state after a run --------------------------------------------------------------------


class FinalState(Struct, frozen=True):
    """The state of broker and processes after all clients have ended and the system is at rest."""

    settled: bool
    """The system came to rest within its time limit."""
    logs: dict[str, list[LogRecord]]
    """By request of the plan, without the logs in `unnamed`."""
    letters: list[DeadLetter]
    messages: dict[str, int]
    """Number of messages by stream."""
    queued_ids: list[str]
    """Ids of requests that are still queued."""
    consumers: dict[str, int]
    """Number of consumers by stream, at the end."""
    consumers_before: dict[str, int]
    """Number of consumers by stream, before the load."""
    beats: list[Heartbeat]
    before: list[Snapshot]
    """Snapshots of processes that were ready and had served no request but warm-ups."""
    after: list[Snapshot]
    shm_before: list[str]
    shm_after: list[str]
    sockets: list[str] = []
    """Addresses of all arenas of this machine that have a listener or a connection."""
    gateway_records: list[str] = []
    """Ids of requests for which gateways have stored a record."""
    temp_files: list[str] = []
    """Names of the files that are left in the workers' temporary folder."""
    unnamed: dict[str, list[LogRecord]] = {}
    """Logs of the speeches over HTTP, by the ids that gateways made."""
    outputs: dict[str, dict[str, list[OutputRecord]]] = {}
    """Logs of the outputs other than the text, by request and name."""
    ends: dict[str, OutputEnds] = {}
    """Lists of the outputs that have ended, by request."""
