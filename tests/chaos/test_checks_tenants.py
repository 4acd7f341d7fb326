"""The checks of tenants, and of requests that no worker has survived, on histories made up."""

from dataclasses import replace

import msgspec
import pytest

from ops.chaos.checks.checker import check
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.history import Event, Overheard, Peeked, ProcessExited, WorkerEvent
from tests.chaos.test_checker import CHUNKS, ID, failure, letter, make_run, with_clients

edit = msgspec.structs.replace


def of_tenant(run: RecordedRun, tenant: str) -> RecordedRun:
    return replace(run, planned={ID: edit(run.planned[ID], tenant=tenant)})


def found(run: RecordedRun) -> set[str]:
    return {violation.invariant for violation in check(run).violations}


def test_a_tenant_that_hears_its_own_log_is_clean() -> None:
    run = of_tenant(make_run(), "acme")
    assert not found(with_clients(run, Overheard(1.3, "acme", ID, CHUNKS[0])))


@pytest.mark.parametrize("id", [ID, "unknown"])
def test_a_tenant_that_hears_the_log_of_another_is_found(id: str) -> None:
    run = of_tenant(make_run(), "acme")
    assert found(with_clients(run, Overheard(1.3, "globex", id, CHUNKS[0]))) == {"I17"}


@pytest.mark.parametrize(("status", "expected"), [(404, set()), (503, set()), (200, {"I17"})])
def test_a_gateway_that_shows_a_request_to_another_tenant_is_found(
    status: int, expected: set[str]
) -> None:
    run = of_tenant(make_run(), "acme")
    assert found(with_clients(run, Peeked(1.3, "globex", ID, status))) == expected


RECEIVED = WorkerEvent(1.2, "received", "c1-0@acme", 1)


def poisoned(*processes: list[Event], code: int = -9) -> RecordedRun:
    """A request that ended as poison, and the journals of engines that have ended since."""
    run = of_tenant(make_run([failure("poison", index=0)]), "acme")
    return replace(
        run,
        final=edit(run.final, letters=[letter()]),
        processes={("engine", pid): events for pid, events in enumerate(processes)},
        pool=[ProcessExited(1.3, "engine", 0, pid, code, True) for pid in range(len(processes))],
    )


def test_poison_is_allowed_where_enough_workers_died_with_the_request() -> None:
    assert not found(poisoned([RECEIVED], [RECEIVED]))


@pytest.mark.parametrize(
    "then",
    [
        [],
        [RECEIVED, WorkerEvent(1.25, "acked", "c1-0@acme", 1)],
        [RECEIVED, WorkerEvent(1.25, "requeued", "c1-0@acme", 1)],
        [RECEIVED, WorkerEvent(1.25, "appended", "c1-0@acme")],
        [edit(RECEIVED, id="c1-1@acme")],
    ],
)
def test_poison_is_a_violation_where_a_worker_did_not_hold_the_request(
    then: list[Event],
) -> None:
    assert found(poisoned([RECEIVED], then)) == {"I10"}


def test_poison_is_a_violation_where_the_workers_ended_well() -> None:
    assert found(poisoned([RECEIVED], [RECEIVED], code=0)) == {"I10"}
