"""Figures of a run: numbers of requests and faults, and how long requests took."""

import itertools
from collections import Counter
from collections.abc import Sequence

from ops.chaos.checks import batches
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.history import (
    EventReceived,
    Fault,
    MemorySample,
    ProcessExited,
    RecordReceived,
    RequestSent,
    SessionFailed,
    SoundReceived,
    WorkerEvent,
)
from ops.chaos.plan import PAINTED
from ops.harness.samples import Samples
from shared.protocol.records import (
    AudioChunk,
    Failure,
    Finish,
    ImageRecord,
    LogRecord,
    OutputEnd,
    StepState,
    TokenChunk,
)
from shared.state.log_records import is_final


def measure(run: RecordedRun) -> dict[str, float]:
    """Return counts, latencies and the largest memory; times are in seconds."""
    first = {id: sessions[0].opened.t for id, sessions in run.sessions.items()}
    took = Samples(t - first[id] for id, t in run.ended.items())
    received_at = sorted(
        event.t
        for event in run.clients
        if isinstance(event, RecordReceived | EventReceived | SoundReceived)
    )
    gaps = [b - a for a, b in itertools.pairwise(received_at)]
    sent_at = [event.t for event in run.clients if isinstance(event, RequestSent)]
    claims = [
        event.id
        for (role, _), events in run.processes.items()
        for event in events
        if role == "engine" and isinstance(event, WorkerEvent) and event.step == "claimed"
    ]
    rss = [event.rss_mib for event in run.pool if isinstance(event, MemorySample)]
    return {
        "requests": len(run.planned),
        "accepted": len(run.accepted),
        "ended": len(run.ended),
        "seconds": (max(received_at) - min(sent_at)) if received_at else 0.0,
        "p50_s": took.median if took else 0.0,
        "p99_s": took.p99 if took else 0.0,
        "max_s": max(took, default=0.0),
        "longest_gap_s": max(gaps, default=0.0),
        "tokens": sum(_num_tokens(run, id) for id in run.final.logs),
        "resumed": sum(_is_resumed(log) for log in run.final.logs.values()),
        "begun": len({*claims}),
        "beginnings": len(claims),
        "max_rss_mib": max(rss, default=0.0),
    }


def _over_http(run: RecordedRun) -> Counter[str]:
    """Count the requests over HTTP, and the ends of their connections."""
    counts = Counter(
        {"gateway records": len(run.final.gateway_records)} if run.http_sessions else {}
    )
    for id, sessions in run.http_sessions.items():
        codes = {failed.code for failed in run.session_failures.get(id, [])}
        cancel = run.cancelled.get(id)
        counts += Counter(
            {
                "streamed": run.planned[id].streamed,
                "whole": not run.planned[id].streamed,
                "connection broken": "connection" in codes,
                "resumed with Last-Event-ID": any(
                    session.opened.publishes and session.opened.start for session in sessions
                ),
                "closed by the client": cancel is not None and cancel.gateway is not None,
            }
        )
    return counts


def _spoken(run: RecordedRun) -> Counter[str]:
    """Count the speeches, their ends, and the outputs that another worker has resumed."""
    counts: Counter[str] = Counter()
    for id in run.final.ends.keys() - run.images.keys():
        log = run.final.logs.get(id, []) or run.final.unnamed.get(id, [])
        ended = bool(log) and isinstance(log[-1], Finish)
        counts["whole" if ended else "cut"] += 1
        counts["over HTTP"] += id in run.final.unnamed
        for name, records in run.final.outputs.get(id, {}).items():
            chunks = [record for record in records if not isinstance(record, OutputEnd)]
            counts[f"resumed {name}"] += len({chunk.attempt for chunk in chunks}) > 1
            counts["samples"] += sum(c.num_samples for c in chunks if isinstance(c, AudioChunk))
    return +counts


def _images_painted(run: RecordedRun) -> Counter[str]:
    """Count the requests for images, their ends, and the ones that another worker has resumed."""
    counts: Counter[str] = Counter()
    for id in run.images:
        log, records = run.final.logs.get(id, []), run.final.outputs.get(id, {}).get(PAINTED, [])
        counts["whole" if log and isinstance(log[-1], Finish) else "cut"] += 1
        parts = [record for record in records if not isinstance(record, OutputEnd)]
        counts["resumed"] += len({record.attempt for record in parts}) > 1
        counts["images"] += sum(isinstance(record, ImageRecord) for record in parts)
        counts["from the result cache"] += bool(parts) and not any(
            isinstance(record, StepState) for record in parts
        )
    return +counts


def _num_tokens(run: RecordedRun, id: str) -> int:
    chunks = [record for record in run.final.logs[id] if isinstance(record, TokenChunk)]
    return sum(len(delta.token_ids) for chunk in chunks for delta in chunk.choices)


def _is_resumed(log: Sequence[LogRecord]) -> bool:
    """Return whether tokens of more than one attempt are in the log."""
    return len({record.attempt for record in log if isinstance(record, TokenChunk)}) > 1


def count(run: RecordedRun) -> dict[str, Counter[str]]:
    """Count faults, deaths, ends of requests and more, each by kind."""
    finals = [log[-1] for log in run.final.logs.values() if is_final(log[-1])]
    return {
        "faults": Counter(f"{e.kind} {e.role}" for e in run.pool if isinstance(e, Fault)),
        "crashes": Counter(
            e.step.removeprefix("crash ") for e in run.did if e.step.startswith("crash")
        ),
        "deaths": Counter(
            f"{e.role} {e.code}"
            for e in run.pool
            if isinstance(e, ProcessExited) and not e.expected_exit
        ),
        "ends": Counter(
            record.error.code if isinstance(record, Failure) else "finish" for record in finals
        ),
        "broken sessions": Counter(e.code for e in run.clients if isinstance(e, SessionFailed)),
        "payloads": Counter(
            e.step for e in run.did if e.step == "rerendered" or e.step.startswith("read by")
        ),
        "http": _over_http(run),
        "speech": _spoken(run),
        "images": _images_painted(run),
        "batches": batches.count(run),
        "behaviours": Counter(planned.behaviour for planned in run.planned.values()),
    }
