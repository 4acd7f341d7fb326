"""The checks of batches, on a batch made up that is right, and wrong in each possible way."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ops.chaos.batch_files import ReceivedBatch, Single
from ops.chaos.batch_plan import PlannedBatch, Purpose, key_of, make_batches, make_bodies
from ops.chaos.checks.batches import CANCEL_S, TAKEOVER_S, WINDOW_S
from ops.chaos.checks.checker import check
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.history import (
    BatchCancelSent,
    BatchCreated,
    BatchDrained,
    BatchEnded,
    Event,
    Fault,
    Overheard,
)
from ops.chaos.plan import Batches, Settings
from tests.chaos.test_checker import CHUNKS, make_run

edit = msgspec.structs.replace
BODIES = [{"n": 0}, {"n": 1}, {"n": 2}]
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
ERROR = {"error": {"code": "invalid_request", "message": "no"}}
NAME = "batch-0"


def answer(number: int, **more: Any) -> dict[str, Any]:
    return {"id": "any", "created": 9, "choices": [f"answer {number}"], "usage": USAGE} | more


def input_line(number: int) -> dict[str, Any]:
    return {"custom_id": f"line {number}\u2028", "body": BODIES[number]}


def result(number: int, status: int = 200, **body: Any) -> dict[str, Any]:
    whole = (answer(number) if status == 200 else ERROR) | body
    response = {"status_code": status, "request_id": "r", "body": whole}
    return {"custom_id": f"line {number}\u2028", "response": response, "error": None}


def early(number: int, code: str) -> dict[str, Any]:
    error = {"code": code, "message": "no"}
    return {"custom_id": f"line {number}\u2028", "response": None, "error": error}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


OUTPUT, ERRORS = [result(0), result(1)], [result(2, 400)]


def received(
    output: list[dict[str, Any]] = OUTPUT,
    errors: list[dict[str, Any]] = ERRORS,
    purpose: Purpose = "complete",
    **body: Any,
) -> ReceivedBatch:
    """A batch of three lines, by default with the right files and counts."""
    content = jsonl(*map(input_line, range(3)))
    described = {
        "id": "batch_0",
        "status": "completed",
        "expires_at": 100,
        "request_counts": {"total": 3, "completed": len(output), "failed": len(errors)},
        "usage": {
            "input_tokens": 5 * len(output),
            "output_tokens": 2 * len(output),
            "total_tokens": 7 * len(output),
        },
    }
    return ReceivedBatch(
        PlannedBatch(NAME, "acme", purpose, "1h", content),
        described | body,
        content,
        jsonl(*output),
        jsonl(*errors),
        jsonl(*errors, *output),
    )


def violations(batch: ReceivedBatch, *events: Event, pool: tuple[Event, ...] = ()) -> set[str]:
    singles = [Single(200, answer(0, id="other")), Single(200, answer(1)), Single(400, ERROR)]
    run = make_run()
    run = replace(
        run,
        batches=[batch],
        singles={key_of(body): single for body, single in zip(BODIES, singles, strict=True)},
        clients=[*run.clients, *events],
        pool=[*pool],
    )
    return {violation.invariant for violation in check(run).violations}


def test_a_right_batch_is_clean() -> None:
    assert violations(received(), BatchCreated(1.0, NAME), BatchEnded(9.0, NAME)) == set()


@pytest.mark.parametrize(
    "batch",
    [
        received(output=[result(0)]),
        received(output=[result(0), result(1), result(1)]),
        received(output=[*OUTPUT, *ERRORS]),
        received(errors=[*ERRORS, early(7, "x")]),
        received(status="in_progress"),
        received(status="failed"),
        edit(received(), body={}),
        edit(received(), input=b""),
        edit(received(), results=received().output),
        edit(received(), output=received().output[:-9]),
    ],
)
def test_lines_without_exactly_one_result_are_found(batch: ReceivedBatch) -> None:
    assert "I18" in violations(batch)


@pytest.mark.parametrize(
    "batch",
    [
        received(output=[result(0), result(1, choices=["answer 0"])]),
        received(output=[result(0), result(1, usage=USAGE | {"completion_tokens": 3})]),
        received(errors=[result(2, 500)]),
        received(errors=[early(2, "batch_cancelled")]),
        received(output=[result(0), result(1) | {"error": {"code": "x"}}]),
        received(output=[result(0)], errors=[result(1), *ERRORS]),
    ],
)
def test_results_that_differ_from_single_requests_are_found(batch: ReceivedBatch) -> None:
    assert "I19" in violations(batch)


def test_the_number_of_cached_tokens_may_differ() -> None:
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}
    assert violations(received(output=[result(0), result(1, usage=usage)])) == set()


@pytest.mark.parametrize(
    "batch",
    [
        received(request_counts={"total": 3, "completed": 3, "failed": 0}),
        received(usage={"input_tokens": 10, "output_tokens": 4, "total_tokens": 15}),
    ],
)
def test_counts_that_differ_from_the_files_are_found(batch: ReceivedBatch) -> None:
    assert violations(batch) == {"I20"}


CANCELLED = received([result(0)], [early(1, "batch_cancelled"), *ERRORS], "cancel")
CANCELLED = edit(CANCELLED, body=CANCELLED.body | {"status": "cancelled"})
CANCEL, ENDED, DRAINED = BatchCancelSent(2.0, NAME), BatchEnded(4.0, NAME), BatchDrained(4.1, NAME)
LATE = BatchEnded(2.5 + CANCEL_S, NAME)
KILL = Fault(2.1, "kill", "batcher", 0, 7)


def test_a_cancelled_batch_keeps_its_finished_lines() -> None:
    assert violations(CANCELLED, CANCEL, ENDED, DRAINED) == set()


def test_requests_that_stay_queued_after_a_cancellation_are_found() -> None:
    assert violations(CANCELLED, CANCEL, ENDED) == {"I21"}
    assert violations(CANCELLED, CANCEL, ENDED, edit(DRAINED, t=9.0)) == {"I21"}


def test_a_late_end_after_a_cancellation_is_found() -> None:
    late = LATE, edit(DRAINED, t=LATE.t)
    assert violations(CANCELLED, CANCEL, *late) == {"I21"}
    # Another batcher had to take the batch over.
    assert TAKEOVER_S > 0.5
    assert violations(CANCELLED, CANCEL, *late, pool=(KILL,)) == set()


def test_another_error_of_a_cancelled_line_is_found() -> None:
    batch = received([result(0)], [early(1, "batch_expired"), *ERRORS], "cancel")
    batch = edit(batch, body=batch.body | {"status": "cancelled"})
    assert violations(batch, CANCEL, ENDED, DRAINED) == {"I19"}


@pytest.mark.parametrize(
    ("expired_at", "ended", "expected"),
    [
        (101, WINDOW_S + 3.0, set()),
        (99, WINDOW_S + 3.0, {"I21"}),
        (101, WINDOW_S + 9.0, {"I21"}),
    ],
)
def test_windows_are_kept(expired_at: int, ended: float, expected: set[str]) -> None:
    batch = received([result(0)], [early(1, "batch_expired"), *ERRORS], "expire")
    batch = edit(batch, body=batch.body | {"status": "expired", "expired_at": expired_at})
    events = BatchCreated(1.0, NAME), BatchEnded(ended, NAME)
    assert violations(batch, *events) == expected


@pytest.mark.parametrize(("tenant", "expected"), [("acme", set()), ("globex", {"I17"})])
def test_a_line_that_another_tenant_hears_is_found(tenant: str, expected: set[str]) -> None:
    heard = Overheard(1.3, tenant, "batch_0~1-0", CHUNKS[0])
    assert violations(received(), heard) == expected


def test_the_plan_is_the_same_in_every_process() -> None:
    settings = Settings(renderer="fake", tenants=("acme", "globex"))
    batches = Batches(num=3, lines=40, cancelled=1)
    planned = make_batches(settings, batches)
    assert planned == make_batches(settings, batches)
    assert [batch.tenant for batch in planned] == ["acme", "globex", "acme"]
    assert [batch.purpose for batch in planned] == ["complete", "complete", "cancel"]
    bodies = [key_of(body) for part in make_bodies(settings, batches) for body in part]
    lines = [json.loads(line) for line in planned[2].content.split(b"\n") if line]
    assert len(lines) == len({line["custom_id"] for line in lines}) == 40
    assert {key_of(line["body"]) for line in lines} <= set(bodies)


def test_runs_without_batches_have_no_violation() -> None:
    run: RecordedRun = make_run()
    assert check(run).counts["batches"] == {}
