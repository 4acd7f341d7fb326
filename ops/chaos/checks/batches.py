"""Invariants I18 to I21: what clients of batches received over HTTP, compared with their input.

The checks know OpenAI's Batch API, and no code of the product.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ops.chaos.batch_files import ReceivedBatch
from ops.chaos.batch_plan import SINGLE, key_of
from ops.chaos.checks.recorded_run import RecordedRun, Violation
from ops.chaos.history import BatchCancelSent, BatchCreated, BatchDrained, BatchEnded, Event, Fault

CANCEL_S = 10.0
DRAIN_S = 2.0
AFTER_WINDOW_S = 5.0
WINDOW_S = 60
# A batch waits for another batcher, which is started if none runs, and for stopped ones.
TAKEOVER_S = 8.0
EARLY_CODES = {"cancelled": "batch_cancelled", "expired": "batch_expired"}
STATUSES = {
    "complete": ("completed",),
    "cancel": ("cancelled", "completed"),
    "expire": ("expired", "completed"),
}
MAX_NAMED = 5
MAX_TEXT = 200


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield the violations of all batches."""
    for batch in run.batches:
        for invariant, check in CHECKS:
            for text in check(run, batch):
                yield Violation(invariant, batch.planned.name, text)


def count(run: RecordedRun) -> Counter[str]:
    """Count the batches by their status, and their lines."""
    counts = Counter(batch.body.get("status", "not accepted") for batch in run.batches)
    for batch in run.batches:
        counts["answered lines"] += batch.output.count(b"\n")
        counts["refused lines"] += batch.errors.count(b"\n")
    return counts


def owner_of_line(run: RecordedRun, request_id: str) -> str | None:
    """Return the tenant of a request for a line, or for the body of one; None for others."""
    if request_id.startswith(SINGLE):
        return next(iter(run.settings.tenants), "")
    for batch in run.batches:
        if batch.body and request_id.startswith(f"{batch.body['id']}~"):
            return batch.planned.tenant
    return None


# -- I18: each line is once in the output or in the error file --------------------------------


def check_lines(run: RecordedRun, batch: ReceivedBatch) -> Iterator[str]:
    status = batch.body.get("status", "not accepted")
    if status not in STATUSES[batch.planned.purpose]:
        yield f"its last status is {status}"
        return
    if batch.input != batch.planned.content:
        yield "the input file differs from the file that was sent"
    sent = [line["custom_id"] for line in _lines(batch.planned.content)]
    answered = Counter(line["custom_id"] for line in _lines(batch.output))
    refused = Counter(line["custom_id"] for line in _lines(batch.errors))
    both = answered + refused
    yield from _listed("lines without a result", set(sent) - both.keys())
    yield from _listed("results without a line", both.keys() - set(sent))
    yield from _listed("lines in both files", answered.keys() & refused.keys())
    yield from _listed("lines with several results", {id for id, num in both.items() if num > 1})
    read = Counter(batch.results.split(b"\n"))
    whole = Counter((batch.output + batch.errors).split(b"\n"))
    if read != whole:
        num_missing, num_more = (whole - read).total(), (read - whole).total()
        yield f"read while it ran: {num_missing} lines are missing, {num_more} are not in the files"


def _listed(text: str, custom_ids: set[str]) -> Iterator[str]:
    if custom_ids:
        names = ", ".join(map(repr, sorted(custom_ids)[:MAX_NAMED]))
        yield f"{len(custom_ids)} {text}: {names}"


def _lines(content: bytes) -> list[dict[str, Any]]:
    """Return the complete lines; the last line of an input file may have no end."""
    lines: list[dict[str, Any]] = []
    for line in filter(None, content.split(b"\n")):
        try:
            lines.append(json.loads(line))
        except ValueError:
            lines.append({"custom_id": f"not JSON: {line[-40:]!r}"})
    return lines


# -- I19: results equal the answers to the same requests alone --------------------------------


def check_results(run: RecordedRun, batch: ReceivedBatch) -> Iterator[str]:
    bodies = {line["custom_id"]: line["body"] for line in _lines(batch.planned.content)}
    early = EARLY_CODES.get(batch.body.get("status", ""))
    for is_refused, content in enumerate((batch.output, batch.errors)):
        for line in _lines(content):
            response = line.get("response")
            if is_refused and response is None and early is not None:
                if (line.get("error") or {}).get("code") != early:
                    yield f"{line['custom_id']!r} has the error {line.get('error')}"
                continue
            single = run.singles.get(key_of(bodies.get(line["custom_id"], {})))
            if single is None:
                continue  # It has no line, or its client was not answered in time.
            if response is None or line.get("error") is not None:
                yield f"{line['custom_id']!r} has no response, but {line.get('error')}"
            elif (response["status_code"] >= 400) != bool(is_refused):
                yield f"{line['custom_id']!r} with status {response['status_code']} in this file"
            elif (response["status_code"], _comparable(response["body"])) != (
                single.status,
                _comparable(single.body),
            ):
                got, due = (
                    str(_comparable(body))[:MAX_TEXT] for body in (response["body"], single.body)
                )
                yield f"{line['custom_id']!r}: {got} instead of {due}"


def _comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without its id, its time, and the number of its cached tokens."""
    usage = {k: v for k, v in body.get("usage", {}).items() if k != "prompt_tokens_details"}
    return {k: v for k, v in body.items() if k not in ("id", "created")} | {"usage": usage}


# -- I20: counts and usage equal the files ----------------------------------------------------


def check_counts(run: RecordedRun, batch: ReceivedBatch) -> Iterator[str]:
    if batch.body.get("status") not in STATUSES[batch.planned.purpose]:
        return
    output, errors = _lines(batch.output), _lines(batch.errors)
    total = len(_lines(batch.planned.content))
    due = {"total": total, "completed": len(output), "failed": len(errors)}
    if batch.body["request_counts"] != due:
        yield f"its counts are {batch.body['request_counts']}, and its files have {due}"
    usages = [((line.get("response") or {}).get("body") or {}).get("usage", {}) for line in output]
    sums = {
        name: sum(usage.get(field, 0) for usage in usages)
        for name, field in (
            ("input_tokens", "prompt_tokens"),
            ("output_tokens", "completion_tokens"),
            ("total_tokens", "total_tokens"),
        )
    }
    told = {name: batch.body["usage"][name] for name in sums}
    if told != sums:
        yield f"its usage is {told}, and the results have {sums}"


# -- I21: cancellations and windows -----------------------------------------------------------


def check_times(run: RecordedRun, batch: ReceivedBatch) -> Iterator[str]:
    name, status = batch.planned.name, batch.body.get("status")
    ended = _time_of(run, BatchEnded, name)
    if ended is None:
        return
    cancel = _time_of(run, BatchCancelSent, name)
    if status == "cancelled" and cancel is not None:
        if (late_s := _lasted_s(run, cancel, ended)) > CANCEL_S:
            yield f"ended {late_s:.1f} s after its cancellation"
        drained = _time_of(run, BatchDrained, name)
        if drained is None:
            yield "requests of its lines are in queues after its end"
        elif (late_s := _lasted_s(run, ended, drained)) > DRAIN_S:
            yield f"requests of its lines were in queues {late_s:.1f} s after its end"
    created = _time_of(run, BatchCreated, name)
    if batch.planned.purpose == "expire" and created is not None:
        if (late_s := _lasted_s(run, created + WINDOW_S, ended)) > AFTER_WINDOW_S:
            yield f"ended {late_s:.1f} s after its window"
        if status == "expired" and batch.body["expired_at"] < batch.body["expires_at"]:
            yield "expired before the end of its window"


def _time_of(run: RecordedRun, kind: type[Event], name: str) -> float | None:
    """Return the first time of an event of a batch."""
    times = (e.t for e in run.clients if isinstance(e, kind) and getattr(e, "name", "") == name)
    return next(times, None)


def _lasted_s(run: RecordedRun, start: float, stop: float) -> float:
    """Return the seconds between two times in which the system had no outage."""
    takeovers = [
        (event.t, event.t + TAKEOVER_S)
        for event in run.pool
        if isinstance(event, Fault) and event.role == "batcher"
    ]
    return stop - start - run.outage_within(start, stop, takeovers)


CHECKS = (
    ("I18", check_lines),
    ("I19", check_results),
    ("I20", check_counts),
    ("I21", check_times),
)
