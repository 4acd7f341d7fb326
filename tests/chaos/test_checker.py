"""The checker on written histories: a clean one, and one wrong in each possible way."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ops.chaos import fake_model
from ops.chaos.checks.checker import check
from ops.chaos.checks.recorded_run import Bounds, RecordedRun
from ops.chaos.expected_answers import Expected, ExpectedChoice
from ops.chaos.history import (
    Accepted,
    CancelSent,
    Fault,
    FinalState,
    MemorySample,
    ProcessExited,
    Ready,
    RecordReceived,
    RequestSent,
    SessionFailed,
    Snapshot,
    WorkerEvent,
)
from ops.chaos.plan import Behaviour, Planned, Settings
from shared.protocol.messages import BlobAddress, DeadLetter, Heartbeat
from shared.protocol.records import (
    ChoiceDelta,
    ErrorInfo,
    Failure,
    Finish,
    LogRecord,
    TokenChunk,
    Usage,
)
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams

edit = msgspec.structs.replace
ID = "c1-0"
CHUNKS: list[TokenChunk] = [
    TokenChunk(0, 1, [ChoiceDelta(0, 0, [11, 12], "ab")]),
    TokenChunk(1, 1, [ChoiceDelta(0, 2, [13], "c", "length")]),
]
FINISH = Finish(2, 1, Usage(5, 3), 1, [])
LOG: list[LogRecord] = [*CHUNKS, FINISH]
BEAT = Heartbeat(
    "engine",
    "engine-1",
    "1",
    7,
    ["demo"],
    {"held": 0, "running": 0, "waiting": 0, "free_blocks": 8, "blocks": 8},
)
PINNED = edit(BEAT, load=BEAT.load | {"arena_pinned": 1})
ARENA = BlobAddress("host", "pagemill-1")
SNAPSHOT = Snapshot(0.0, "engine", 7, fds=9, memfds=0, threads=3, tasks=8, subscriptions=4)


def failure(code: str, index: int = 2, message: str = "no") -> Failure:
    return Failure(index, 1, ErrorInfo(code, message, None, "server", False), [])


def planned(behaviour: Behaviour = "plain", timeout_s: float = 10.0, seed: int = 1) -> Planned:
    sampling = SamplingParams(seed=seed)
    request = GenerateRequest("demo", [Message("user", "?")], sampling, timeout_s=timeout_s)
    return Planned(ID, request, behaviour, 0, timeout_s)


def letter(request_id: str = ID) -> DeadLetter:
    error = ErrorInfo("poison", "no", None, "server", False)
    return DeadLetter("engine", "w", "1", "s", request_id, 2, error, "", [], b"", b"", 0, 0.0)


def make_run(
    log: list[LogRecord] = LOG, behaviour: Behaviour = "plain", ends_at: float = 1.4, **p: Any
) -> RecordedRun:
    """One request, sent at 1.0 and accepted at 1.1. A client has received its whole log."""
    times = [*(1.2 + 0.01 * i for i in range(len(log) - 1)), ends_at]
    return RecordedRun(
        settings=Settings(requests=1, max_deaths=2),
        planned={ID: planned(behaviour, **p)},
        expected={ID: Expected(5, [ExpectedChoice([11, 12, 13], "abc", "length")])},
        clients=[
            RequestSent(1.0, ID, 1, 0, True),
            Accepted(1.1, ID, 1),
            *(RecordReceived(t, ID, 1, record) for t, record in zip(times, log, strict=False)),
        ],
        pool=[],
        workers=[],
        final=FinalState(
            settled=True,
            logs={ID: log} if log else {},
            letters=[],
            messages={"REQUESTS": 0, "STAGES": 0},
            queued_ids=[],
            consumers={"STAGES": 4},
            consumers_before={"STAGES": 4},
            beats=[BEAT],
            before=[SNAPSHOT],
            after=[SNAPSHOT],
            shm_before=["other"],
            shm_after=["other"],
        ),
        bounds=Bounds(rss_mib={"engine": 100.0}),
    )


def with_final(run: RecordedRun, **changes: Any) -> RecordedRun:
    return replace(run, final=edit(run.final, **changes))


def with_clients(run: RecordedRun, *more: Any) -> RecordedRun:
    return replace(run, clients=[*run.clients, *more])


def with_pool(run: RecordedRun, *more: Any) -> RecordedRun:
    return replace(run, pool=[*run.pool, *more])


def with_workers(run: RecordedRun, *more: Any) -> RecordedRun:
    return replace(run, workers=[*run.workers, *more])


def harmful(log: list[LogRecord], deaths: int, seed: int = fake_model.KILLS_SEED) -> RecordedRun:
    run = make_run(log, "harm", seed=seed)
    return with_workers(run, *(WorkerEvent(1.3, "harm", ID, seed) for _ in range(deaths)))


def seen(log: list[LogRecord], session: int, start: int = 0, publishes: bool = True) -> list[Any]:
    return [
        RequestSent(2.0, ID, session, start, publishes),
        *(RecordReceived(2.1, ID, session, record) for record in log),
    ]


EARLY = failure("deadline_exceeded")


def asked_again(ends_at: float, *more: Any) -> RecordedRun:
    """A request is due at 11.1, and its client asks again at 15.0."""
    run = make_run([failure("deadline_exceeded", 0)], "deadline")
    again = RequestSent(15.0, ID, 2, 0, True)
    end = RecordReceived(ends_at, ID, 2, failure("deadline_exceeded", 0))
    return replace(run, clients=[*run.clients[:2], *more, again, end])


LATE_CHUNK = TokenChunk(1, 0, [ChoiceDelta(0, 2, [13], "c", "length")])

CLEAN: dict[str, RecordedRun] = {
    "a request that ends well": make_run(),
    "cancelled on request": with_clients(
        make_run([CHUNKS[0], failure("cancelled", 1)], "cancel"), CancelSent(1.3, ID)
    ),
    "finished before its cancellation": with_clients(make_run(LOG, "cancel"), CancelSent(1.3, ID)),
    "out of time": make_run([CHUNKS[0], failure("deadline_exceeded", 1)], "deadline", ends_at=11.2),
    "late by the death of its client": asked_again(ends_at=15.5),
    "late by an outage of the broker": with_pool(
        make_run([failure("deadline_exceeded", 0)], "deadline", ends_at=16.0),
        Fault(10.0, "stop", "broker", 0, 3),
        Ready(14.0, "broker", 0, 3, 0.2),
    ),
    "late for want of coordinators": with_pool(
        make_run([failure("deadline_exceeded", 0)], "deadline", ends_at=16.0),
        Ready(0.0, "coordinator", 0, 3, 0.2),
        Ready(0.0, "coordinator", 1, 4, 0.2),
        Fault(10.0, "kill", "coordinator", 0, 3),
        Fault(10.5, "kill", "coordinator", 1, 4),
        ProcessExited(10.6, "coordinator", 1, 4, -9, True),
        Ready(14.0, "coordinator", 0, 5, 0.2),
    ),
    "a second session from the middle": with_clients(make_run(), *seen(LOG[1:], 2, 1, False)),
    "asked again after its end": with_clients(make_run(LOG, "resubmit_after"), *seen(LOG, 2)),
    "a client that was killed in between": with_clients(
        replace(make_run(), clients=make_run().clients[:3]), *seen(LOG, 2)
    ),
    "poison": with_final(harmful([failure("poison", 0)], 2), letters=[letter()]),
    "refused at once, and never accepted": replace(
        make_run([]),
        clients=[RequestSent(1.0, ID, 1, 0, True), SessionFailed(1.2, ID, 1, "overloaded", "full")],
    ),
    "given up, and stored by a broker that had been stopped": replace(
        make_run([failure("deadline_exceeded", 0)], "deadline"),
        clients=[RequestSent(1.0, ID, 1, 0, True), SessionFailed(9.0, ID, 1, "silence", "nothing")],
    ),
    "a payload of whose key nobody knows any more": with_workers(
        with_final(make_run(), beats=[PINNED]), WorkerEvent(1.0, "borrowed", "engine-1:aa", at=99)
    ),
    "a connection to another worker": with_final(
        make_run(),
        beats=[BEAT, edit(BEAT, worker="renderer-1", role="renderer", blobs=ARENA)],
        after=[edit(SNAPSHOT, peers=["pagemill-1"], mappings=2)],
    ),
    "recovered in time": with_pool(make_run(), Fault(0.9, "kill", "engine", 0, 3)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_history_has_no_violations(name: str) -> None:
    assert check(CLEAN[name]).violations == []


ONE_COORDINATOR_LEFT = with_pool(
    make_run([failure("deadline_exceeded", 0)], "deadline", ends_at=16.0),
    Ready(0.0, "coordinator", 0, 3, 0.2),
    Ready(0.0, "coordinator", 1, 4, 0.2),
    Fault(10.0, "kill", "coordinator", 0, 3),
    Ready(14.0, "coordinator", 0, 5, 0.2),
)

WRONG: dict[str, tuple[str, RecordedRun]] = {
    "no end": ("I1", make_run([*CHUNKS])),
    "no client saw the end": ("I1", replace(make_run(), clients=make_run().clients[:-1])),
    "no log at all": ("I1", make_run([])),
    "ended late": (
        "I1",
        make_run([failure("deadline_exceeded", 0)], "deadline", ends_at=13.2),
    ),
    "late though there was a coordinator": ("I1", ONE_COORDINATOR_LEFT),
    "late after the death of its client": ("I1", asked_again(ends_at=17.2)),
    "late for a client that has waited": (
        "I1",
        asked_again(15.5, SessionFailed(14.9, ID, 1, "silence", "no final record")),
    ),
    "cancelled late": (
        "I1",
        with_clients(
            make_run([failure("cancelled", 0)], "cancel", ends_at=3.5), CancelSent(1.3, ID)
        ),
    ),
    "a gap in the log": ("I2", make_run([CHUNKS[0], edit(FINISH, index=2)])),
    "a repeated record": ("I2", make_run([CHUNKS[0], CHUNKS[0], *LOG[1:]])),
    "two ends": ("I2", make_run([*LOG, edit(FINISH, index=3)])),
    "repeated tokens": (
        "I2",
        make_run(
            [CHUNKS[0], TokenChunk(1, 1, [ChoiceDelta(0, 1, [13], "c", "length")]), FINISH],
        ),
    ),
    "a session with a gap": ("I2", with_clients(make_run(), *seen([LOG[0], LOG[2]], 2))),
    "a session that repeats": ("I2", with_clients(make_run(), *seen([LOG[0], *LOG], 2))),
    "seen but not in the log": (
        "I2",
        with_clients(make_run(), *seen([edit(LOG[0], attempt=9)], 2)),
    ),
    "a wrong token": (
        "I3",
        make_run([TokenChunk(0, 1, [ChoiceDelta(0, 0, [11, 99], "ab")]), *LOG[1:]]),
    ),
    "a token too few": (
        "I3",
        make_run(
            [TokenChunk(0, 1, [ChoiceDelta(0, 0, [11], "abc", "length")]), edit(FINISH, index=1)]
        ),
    ),
    "wrong text": (
        "I3",
        make_run([TokenChunk(0, 1, [ChoiceDelta(0, 0, [11, 12], "aX")]), *LOG[1:]]),
    ),
    "wrong reason": (
        "I3",
        make_run([CHUNKS[0], TokenChunk(1, 1, [ChoiceDelta(0, 2, [13], "c", "stop")]), FINISH]),
    ),
    "wrong usage": ("I3", make_run([*CHUNKS, edit(FINISH, usage=Usage(5, 4))])),
    "wrong tokens before an error": (
        "I3",
        make_run(
            [
                TokenChunk(0, 1, [ChoiceDelta(0, 0, [99], "a")]),
                failure("deadline_exceeded", 1),
            ],
            "deadline",
            ends_at=11.2,
        ),
    ),
    "a choice too many": (
        "I3",
        make_run(
            [edit(CHUNKS[0], choices=[*CHUNKS[0].choices, ChoiceDelta(1, 0, [1], "")]), *LOG[1:]]
        ),
    ),
    "an older attempt after a newer one": ("I4", make_run([CHUNKS[0], LATE_CHUNK, FINISH])),
    "a request is left in its queue": (
        "I5",
        with_final(make_run(), messages={"REQUESTS": 1, "STAGES": 0}, queued_ids=[ID]),
    ),
    "work is left in its queue": (
        "I5",
        with_final(make_run(), messages={"REQUESTS": 0, "STAGES": 1}),
    ),
    "no rest": ("I5", with_final(make_run(), settled=False)),
    "a log nobody asked for": ("I5", with_final(make_run(), logs={ID: LOG, "c1-9": LOG})),
    "no dead letter": ("I5", harmful([failure("poison", 0)], 2)),
    "a dead letter of an answer": ("I5", with_final(make_run(), letters=[letter()])),
    "a block is missing": (
        "I6",
        with_final(make_run(), beats=[edit(BEAT, load=BEAT.load | {"free_blocks": 7})]),
    ),
    "a request is held": (
        "I6",
        with_final(make_run(), beats=[edit(BEAT, load=BEAT.load | {"held": 1})]),
    ),
    "blocks held between requests": (
        "I6",
        with_workers(make_run(), WorkerEvent(1.0, "leak", at=2)),
    ),
    "a segment is left": ("I7", with_final(make_run(), shm_after=["other", "psm_1"])),
    "a memfd is left": ("I7", with_final(make_run(), after=[edit(SNAPSHOT, memfds=1)])),
    "a payload is pinned": ("I7", with_final(make_run(), beats=[PINNED])),
    "a payload is pinned by a key that was passed on": (
        "I7",
        with_workers(
            with_final(make_run(), beats=[PINNED]),
            WorkerEvent(1.0, "borrowed", "engine-1:aa", at=99),
            WorkerEvent(1.1, "forwarded", "engine-1:aa", at=99),
        ),
    ),
    "a payload is pinned by a key of somebody alive": (
        "I7",
        with_workers(
            with_final(make_run(), beats=[PINNED]),
            WorkerEvent(1.0, "borrowed", "engine-1:aa", at=BEAT.pid),
        ),
    ),
    "a connection to a dead worker": (
        "I7",
        with_final(make_run(), after=[edit(SNAPSHOT, peers=["pagemill-1"])]),
    ),
    "memory of somebody dead": ("I7", with_final(make_run(), after=[edit(SNAPSHOT, mappings=2)])),
    "a reader that nobody is": ("I7", with_final(make_run(), after=[edit(SNAPSHOT, readers=1)])),
    "a socket of somebody dead": (
        "I7",
        with_workers(
            with_final(make_run(), sockets=["pagemill-1"]), WorkerEvent(1.0, "arena", "pagemill-1")
        ),
    ),
    "a temporary file is left": ("I8", with_final(make_run(), temp_files=["tmp1"])),
    "a file is open": ("I8", with_final(make_run(), after=[edit(SNAPSHOT, fds=10)])),
    "a task is left": ("I8", with_final(make_run(), after=[edit(SNAPSHOT, tasks=9)])),
    "a subscription is left": (
        "I8",
        with_final(make_run(), after=[edit(SNAPSHOT, subscriptions=5)]),
    ),
    "a consumer is left": ("I8", with_final(make_run(), consumers={"STAGES": 5})),
    "a slow recovery": (
        "I9",
        with_pool(
            make_run([failure("deadline_exceeded", 0)], "deadline", ends_at=11.2),
            Fault(0.9, "kill", "engine", 0, 3),
        ),
    ),
    "an error nobody had to expect": ("I10", make_run([failure("unavailable", 0)])),
    "cancelled for nobody": ("I10", make_run([failure("cancelled", 0)])),
    "out of time too early": ("I10", make_run([EARLY], "deadline", ends_at=5.0)),
    "out of plenty of time": (
        "I10",
        make_run([failure("deadline_exceeded", 0)], "plain", ends_at=11.2),
    ),
    "an error that tells of paths": (
        "I10",
        make_run([failure("x", 0, "no such file: /root/models/secret")], "harm"),
    ),
    "a killer of too many": (
        "I11",
        with_final(harmful([failure("poison", 0)], 3), letters=[letter()]),
    ),
    "a killer that is answered": ("I11", harmful(LOG, 2)),
    "hung, and given up": (
        "I11",
        harmful([failure("deadline_exceeded", 0)], 1, fake_model.HANGS_SEED),
    ),
    "crashed by itself": (
        "I11",
        with_pool(make_run(), ProcessExited(1.0, "engine", 0, 3, -11, False)),
    ),
    "asked again in vain": ("I12", make_run(LOG, "resubmit_after")),
    "told another story": (
        "I12",
        with_clients(make_run(), *seen([*CHUNKS, edit(FINISH, kv_blocks=9)], 2)),
    ),
    "too much memory": ("I13", with_pool(make_run(), MemorySample(1.0, "engine", 7, 101.0))),
    "refused late": (
        "I14",
        with_clients(
            make_run(),
            RequestSent(2.0, ID, 2, 0, True),
            SessionFailed(4.0, ID, 2, "overloaded", "full"),
        ),
    ),
    "a log of what was refused": (
        "I14",
        replace(make_run(), clients=[e for e in make_run().clients if not isinstance(e, Accepted)]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_violates_its_invariant(name: str) -> None:
    invariant, run = WRONG[name]
    violations = check(run).violations
    assert invariant in {violation.invariant for violation in violations}, violations


def test_every_invariant_has_a_wrong_history() -> None:
    assert {invariant for invariant, _ in WRONG.values()} == {f"I{n}" for n in range(1, 15)}


def test_figures() -> None:
    figures = check(make_run()).figures
    assert (figures["requests"], figures["accepted"], figures["ended"]) == (1, 1, 1)
    assert figures["tokens"] == 3
    assert figures["max_s"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("start", "stop", "seconds"), [(0, 1, 0), (0, 3, 1), (2.5, 9, 2.5), (0, 20, 6)]
)
def test_overlapping_outages_count_once(start: float, stop: float, seconds: float) -> None:
    run = with_pool(
        replace(make_run(), bounds=Bounds(broker_recovery_s=1.0)),
        Fault(2.0, "kill", "broker", 0, 3),
        Ready(3.0, "broker", 0, 3, 0.1),
        Fault(3.5, "kill", "broker", 0, 4),
        Ready(4.0, "broker", 0, 4, 0.1),
        Fault(10.0, "kill", "broker", 0, 5),
        Ready(12.0, "broker", 0, 5, 0.1),
    )
    assert run.outage_within(start, stop) == pytest.approx(seconds)
