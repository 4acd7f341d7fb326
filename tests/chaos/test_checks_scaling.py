"""The checks of scaled pools, on runs that are made up: a clean one, and one for each fault."""

from typing import Any

import pytest

from ops.chaos.checks import scaling
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.expected_answers import Expected, ExpectedChoice
from ops.chaos.history import (
    Accepted,
    Drained,
    Event,
    Fault,
    ProcessExited,
    Ready,
    RecordReceived,
    RequestSent,
    Started,
)
from ops.chaos.plan import Scaled, Settings, make_requests
from shared.protocol.records import Finish, Usage

SCALED = Scaled(max=2, per_engine=4, idle_s=5.0)
STEP_S = 0.1
NUM_REQUESTS = 12
# Answers of 80 tokens, four at a time in each of two engines: two rounds of eight seconds.
NUM_TOKENS = 80
ENDS = [11.0] * 8 + [19.0] * 4
START, READY = 0.5, 2.5
POOL: list[Event] = [
    Started(START, "engine", 0, 1),
    Started(START, "engine", 0, 2),
    Ready(READY, "engine", 0, 1, 2.0),
    Ready(READY, "engine", 0, 2, 2.0),
]


def end(pid: int, at_s: float, code: int = 0) -> list[Event]:
    return [
        Drained(at_s, "engine", pid, pid),
        ProcessExited(at_s + 0.5, "engine", 0, pid, code, False),
    ]


CLEAN = [*POOL, *end(2, 20.0), *end(1, 24.5)]


def make_run(pool: list[Event], scaled: Scaled = SCALED, ends: list[float] = ENDS) -> RecordedRun:
    clients: list[Event] = []
    for number, end_s in enumerate(ends):
        id = f"c1-{number}"
        finish = Finish(0, 1, Usage(5, NUM_TOKENS), 1, [])
        clients += [
            RequestSent(0.0, id, 1, 0, True),
            Accepted(0.1, id, 1),
            RecordReceived(end_s, id, 1, finish),
        ]
    settings = Settings(requests=NUM_REQUESTS, step_ms=1000 * STEP_S, max_num_seqs=4, scaled=scaled)
    planned = {request.id: request for request in make_requests(settings)}
    expected = Expected(5, [ExpectedChoice([1] * NUM_TOKENS)])
    events: Any = clients
    recorded: Any = pool
    # The checks of pools read nothing of what is left at the end.
    final: Any = None
    ids = [f"c1-{number}" for number in range(len(ends))]
    return RecordedRun(settings, planned, dict.fromkeys(ids, expected), events, recorded, [], final)


def faults(run: RecordedRun) -> list[str]:
    return [violation.text for violation in scaling.find(run)]


def test_a_pool_that_grows_and_goes_back_is_clean() -> None:
    run = make_run(CLEAN)
    assert faults(run) == []
    measured = scaling.measure(run)
    assert (measured["peak_engines"], measured["cold_start_s"]) == (2, 2.0)
    assert measured["engine_s"] == pytest.approx(20.0 + 24.5)
    assert measured["zero_after_s"] == pytest.approx(6.0)


def test_the_simulator_runs_the_same_requests_with_the_same_policy() -> None:
    measured = scaling.measure(make_run(CLEAN))
    # A start of 2 s, two rounds of 8 s in the first engines, and `idle_s`.
    assert measured["simulated_engine_s"] == pytest.approx(2 * (2 + 8 + 8 + 5), rel=0.15)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ([*POOL, *end(2, 20.0, code=-9), *end(1, 24.5)], "ended with code -9"),
        ([*POOL, *end(2, 14.0), *end(1, 24.5)], "left 1 workers for the work of 2"),
        ([*POOL, *end(2, 14.0), *end(1, 14.0)], "left 0 workers for the work of 2"),
        ([*POOL, *end(2, 20.0)], "1 workers are left"),
        ([*POOL, *end(2, 20.0), *end(1, 34.5)], "15.0 s are allowed"),
        ([POOL[0], POOL[2], *end(1, 24.5)], "had 1 workers at most instead of 2"),
    ],
)
def test_each_fault_is_reported(pool: list[Event], message: str) -> None:
    ends = [11.0] * 4 + [19.0] * 8
    assert any(message in fault for fault in faults(make_run(pool, ends=ends)))


def test_a_killed_worker_and_a_start_that_is_given_up_are_no_faults() -> None:
    killed = [
        Fault(5.0, "kill", "engine", 0, 2),
        ProcessExited(5.0, "engine", 0, 2, -9, False),
        Started(5.5, "engine", 0, 3),
        Started(5.5, "engine", 0, 4),
        Drained(10.0, "engine", 9, 4),
        ProcessExited(10.5, "engine", 0, 4, 0, False),
    ]
    reports = faults(make_run([*POOL, *killed, *end(3, 20.0), *end(1, 24.5)]))
    # Two processes were started in place of one.
    assert reports == ["had 3 workers at most instead of 2"]


def test_more_engine_seconds_than_the_simulator_allows_are_a_fault() -> None:
    strict = Scaled(max=2, per_engine=4, idle_s=5.0, max_engine_s=0.5)
    assert any("engine-seconds" in fault for fault in faults(make_run(CLEAN, strict)))
    loose = Scaled(max=2, per_engine=4, idle_s=5.0, max_engine_s=1.3)
    assert faults(make_run(CLEAN, loose)) == []
