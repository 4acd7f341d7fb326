"""Invariants I5 to I9 and I13: queues, pools and processes at rest, and recovery from faults."""

import bisect
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from ops.chaos.checks.recorded_run import BROKER_ROLES, RecordedRun, Violation
from ops.chaos.history import (
    Fault,
    ImageReceived,
    MemorySample,
    ProcessExited,
    RequestSent,
    Snapshot,
    SoundReceived,
)
from ops.chaos.plan import PAINTER, TALKER, VOCODER
from shared.protocol import subjects
from shared.protocol.records import Failure
from shared.stage.graphs import PARTS

# Exit codes of a process that ended by itself: a configuration error, or a crash of the
# interpreter. A worker that gave up its broker exits with 1 and is started again.
BAD_CODES = {78: "refused its configuration", -11: "segmentation fault", -6: "aborted"}
DEAD_LETTER_CODES = ("poison", "worker_failure")


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield the violations of the system as a whole."""
    for invariant, check in CHECKS:
        for subject, text in check(run):
            yield Violation(invariant, subject, text)


# -- I5: no work is removed without an end ----------------------------------------------------


def check_queues(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for stream in (subjects.REQUESTS_STREAM, subjects.STAGES_STREAM, subjects.BATCHJOBS_STREAM):
        if left := run.final.messages.get(stream, 0):
            names = (
                f": {', '.join(run.final.queued_ids)}" if stream == subjects.REQUESTS_STREAM else ""
            )
            yield stream, f"holds {left} messages after all clients have ended{names}"
    if not run.final.settled:
        yield "system", "did not come to rest"


def check_letters(run: RecordedRun) -> Iterator[tuple[str, str]]:
    lettered = {letter.request_id for letter in run.final.letters}
    for id, log in run.final.logs.items():
        end = log[-1]
        if isinstance(end, Failure) and end.error.code in DEAD_LETTER_CODES and id not in lettered:
            yield id, f"ended with {end.error.code} without a dead letter"
    for letter in run.final.letters:
        log = run.final.logs.get(letter.request_id or "", [])
        if letter.request_id is not None and not (log and isinstance(log[-1], Failure)):
            yield letter.request_id, "has a dead letter, but its log did not end with an error"


# -- I6 to I8: no resource is leaked ----------------------------------------------------------


# Thread pools start their threads one by one under load: the pool of rendering, and the pool of
# asyncio, which connects workers to the owners of payloads.
POOL_THREADS = {
    "renderer": 8,
    "encoder": 7,
    "engine": 6,
    "gateway": 6,
    "batcher": 6,
    TALKER: 6,
    VOCODER: 6,
    **dict.fromkeys((PAINTER, *PARTS), 6),
}
COUNTED_RESOURCES = ("fds", "memfds", "threads", "tasks", "subscriptions")


def check_blocks(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for beat in run.final.beats:
        load = beat.load
        if beat.role == "engine" and load.get("free_blocks") != load.get("blocks"):
            yield beat.worker, f"{load['free_blocks']:g} of {load['blocks']:g} blocks are free"
        for name in ("held", "running", "waiting"):
            if load.get(name):
                yield beat.worker, f"{name} is {load[name]:g} although the worker is idle"
    for event in run.did:
        if event.step == "leak":
            yield "engine", f"{event.at} blocks were in use while no sequence ran"


def check_shared_memory(run: RecordedRun) -> Iterator[tuple[str, str]]:
    if new := set(run.final.shm_after) - set(run.final.shm_before):
        yield "system", f"left in /dev/shm: {', '.join(sorted(new))}"


def check_memfds(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for role, before, after in _pairs(run):
        if after.memfds > before.memfds:
            yield f"{role} {after.pid}", f"memfds: {after.memfds}, {before.memfds} at first"


def check_pins(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Check pinned payloads; only keys of dead borrowers may stay valid until they expire."""
    orphaned = _count_orphaned_keys(run)
    for beat in run.final.beats:
        pinned = beat.load.get("arena_pinned", 0)
        if pinned > orphaned[beat.worker]:
            yield beat.worker, f"{pinned:g} payloads are pinned although they have no reader"


def _count_orphaned_keys(run: RecordedRun) -> Counter[str]:
    """Count, by owner, the keys that a process borrowed and did not end before it died."""
    living = {beat.pid for beat in run.final.beats}
    borrowed = {e.id for e in run.did if e.step == "borrowed" and e.at not in living}
    ended = {e.id for e in run.did if e.step in ("returned", "forwarded")}
    return Counter(id.partition(":")[0] for id in borrowed - ended)


def check_transports(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Check that no process is connected to a dead worker or maps its memory."""
    arenas = [beat.blobs for beat in run.final.beats if beat.blobs is not None]
    living = {arena.local for arena in arenas}
    living |= {f"{arena.tcp[0]}:{arena.tcp[1]}" for arena in arenas if arena.tcp is not None}
    for held in run.final.after:
        name, peers = f"{held.role} {held.pid}", set(held.peers)
        gone = peers - living
        if len(gone) > run.bounds.foreign_peers:
            yield name, f"has connections to {len(gone)} workers that have ended"
        if len(held.peers) > len(peers):
            yield name, f"has {len(held.peers)} connections to {len(peers)} workers"
        near = sum(peer.startswith("pagemill-") for peer in peers)
        if held.mappings > 1 + near:
            yield name, f"maps {held.mappings} arenas, and is connected to {near} workers"
        # Each neighbour may read by shared memory and by TCP.
        if held.readers > 2 * max(len(arenas) - 1, 0):
            yield name, f"serves {held.readers} readers, with {len(arenas) - 1} other workers"
    ours = {event.id for event in run.did if event.step == "arena"}
    if left := set(run.final.sockets) & ours - living:
        yield "system", f"{len(left)} sockets of arenas whose workers have ended"


def check_files(run: RecordedRun) -> Iterator[tuple[str, str]]:
    if left := run.final.temp_files:
        yield "system", f"temporary files are left: {', '.join(left)}"


def check_resources(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for role, before, after in _pairs(run):
        for name in ("fds", "threads", "tasks", "subscriptions"):
            num_before, num_after = getattr(before, name), getattr(after, name)
            spare = POOL_THREADS.get(role, 0) if name == "threads" else 0
            if num_after > num_before + spare:
                new = Counter(after.task_names) - Counter(before.task_names)
                names = f" ({', '.join(new.elements())})" if name == "tasks" else ""
                yield f"{role} {after.pid}", f"{name}: {num_after}, {num_before} at first{names}"
    for stream, num_before in run.final.consumers_before.items():
        num_after = run.final.consumers.get(stream, 0)
        if num_after > num_before:
            yield stream, f"{num_after} consumers, {num_before} at first"


def _pairs(run: RecordedRun) -> Iterator[tuple[str, Snapshot, Snapshot]]:
    """Pair the most that any process of a role held at first with each process at the end."""
    most: dict[str, Snapshot] = {}
    for snapshot in run.final.before:
        largest = most.setdefault(snapshot.role, snapshot)
        more = {
            name: max(getattr(largest, name), getattr(snapshot, name)) for name in COUNTED_RESOURCES
        }
        names = max(largest, snapshot, key=lambda each: each.tasks).task_names
        most[snapshot.role] = replace(snapshot, **more, task_names=names)
    for snapshot in run.final.after:
        if snapshot.role in most:
            yield snapshot.role, most[snapshot.role], snapshot


def check_memory(run: RecordedRun) -> Iterator[tuple[str, str]]:
    most: dict[tuple[str, int], float] = {}
    for event in run.pool:
        if isinstance(event, MemorySample):
            key = event.role, event.pid
            most[key] = max(most.get(key, 0.0), event.rss_mib)
    for (role, pid), rss_mib in most.items():
        budget = run.bounds.rss_mib.get(role)
        if budget is not None and rss_mib > budget:
            yield f"{role} {pid}", f"used {rss_mib:.0f} MiB of {budget:.0f} MiB"


# Requests do not go through these. The wait of a pool at zero is I15, and batches have I21.
OFF_THE_PATH = ("load", "autoscaler", "batcher")


# -- I9: recovery -----------------------------------------------------------------------------


def recoveries(run: RecordedRun) -> list[tuple[Fault, float]]:
    """Return, for each kill, the seconds until the first record of a later request.

    Kills without a request soon after them are left out, and so are stops, which last longer.
    """
    over_nats = sorted(
        (sessions[0].opened.t, sessions[0].received[0].t)
        for id, sessions in run.sessions.items()
        if sessions[0].received and sessions[0].opened.publishes and run.planned[id].writes
    )
    over_http = sorted(
        (sessions[0].opened.t, min(session.events[0].t for session in sessions if session.events))
        for id, sessions in run.http_sessions.items()
        if run.planned[id].streamed and any(session.events for session in sessions)
    )
    spoken, painted = _first_pieces(run, SoundReceived), _first_pieces(run, ImageReceived)
    delays = []
    for fault in run.pool:
        if not isinstance(fault, Fault) or fault.kind != "kill" or fault.role in OFF_THE_PATH:
            continue
        firsts = over_http if fault.role == "gateway" else over_nats
        if fault.role in (TALKER, VOCODER):
            firsts = spoken
        elif fault.role in (PAINTER, *PARTS):
            firsts = painted
        sent_at = [t for t, _ in firsts]
        # All requests of the next two seconds count, because the first of them may be a long one.
        start, stop = bisect.bisect(sent_at, fault.t), bisect.bisect(sent_at, fault.t + 2.0)
        if start < stop:
            first = min(got for _, got in firsts[start:stop])
            delays.append((fault, first - fault.t))
    return delays


def _first_pieces(
    run: RecordedRun, kind: type[SoundReceived] | type[ImageReceived]
) -> list[tuple[float, float]]:
    """Return when requests were first sent, and when their first piece was received, in order."""
    sent_at: dict[str, float] = {}
    received_at: dict[str, float] = {}
    for event in run.clients:
        if isinstance(event, RequestSent):
            sent_at.setdefault(event.id, event.t)
        elif isinstance(event, kind):
            received_at.setdefault(event.id, event.t)
    return sorted((sent_at[id], t) for id, t in received_at.items())


def check_recovery(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for fault, took_s in recoveries(run):
        is_broker = fault.role in BROKER_ROLES
        bound_s = run.bounds.broker_recovery_s if is_broker else run.bounds.recovery_s
        took_s -= 0.0 if is_broker else run.outage_within(fault.t, fault.t + took_s)
        if took_s > bound_s:
            yield f"{fault.role} {fault.pid}", f"{took_s:.2f} s from its death to a first record"


# -- I11: processes that end by themselves ----------------------------------------------------


def check_deaths(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for event in run.pool:
        if not isinstance(event, ProcessExited):
            continue
        name = f"{event.role} {event.pid}"
        if event.code in BAD_CODES:
            yield name, BAD_CODES[event.code]
    for fault in _drains(run):
        ended = next(
            (e for e in run.pool if isinstance(e, ProcessExited) and e.pid == fault.pid), None
        )
        if ended is not None and ended.code not in (0, -9):
            yield f"{fault.role} {fault.pid}", f"drained with exit code {ended.code}"


def _drains(run: RecordedRun) -> Iterator[Fault]:
    return (e for e in run.pool if isinstance(e, Fault) and e.kind == "drain")


CHECKS = (
    ("I5", check_queues),
    ("I5", check_letters),
    ("I6", check_blocks),
    ("I7", check_shared_memory),
    ("I7", check_memfds),
    ("I7", check_pins),
    ("I7", check_transports),
    ("I8", check_files),
    ("I8", check_resources),
    ("I9", check_recovery),
    ("I11", check_deaths),
    ("I13", check_memory),
)
