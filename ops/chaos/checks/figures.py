"""How much a run did, how long that took, and what was done to it."""

import itertools
from collections import Counter
from collections.abc import Sequence

from ops.chaos.checks.recorded_run import Run
from ops.chaos.history import (
    Asked,
    Broke,
    Ended,
    Fault,
    Got,
    Memory,
    Saw,
)
from shared.protocol.messages import Failure, LogRecord, TokenChunk
from shared.state.token_log import is_final


def measure(run: Run) -> dict[str, float]:
    first = {id: sessions[0].asked.t for id, sessions in run.sessions.items()}
    took = sorted(t - first[id] for id, t in run.ended.items())
    seen = sorted(event.t for event in run.clients if isinstance(event, Got | Saw))
    gaps = [b - a for a, b in itertools.pairwise(seen)]
    asked = [event.t for event in run.clients if isinstance(event, Asked)]
    rss = [event.rss_mib for event in run.pool if isinstance(event, Memory)]
    return {
        "requests": len(run.planned),
        "accepted": len(run.accepted),
        "ended": len(run.ended),
        "seconds": (max(seen) - min(asked)) if seen else 0.0,
        "p50_s": percentile(took, 50),
        "p99_s": percentile(took, 99),
        "max_s": percentile(took, 100),
        "longest_gap_s": max(gaps, default=0.0),
        "tokens": sum(_num_tokens(run, id) for id in run.final.logs),
        "resumed": sum(_is_resumed(log) for log in run.final.logs.values()),
        "max_rss_mib": max(rss, default=0.0),
    }


def _over_http(run: Run) -> Counter[str]:
    """Requests, and what became of their connections."""
    found = Counter({"notes": len(run.final.notes)} if run.readings else {})
    for id, readings in run.readings.items():
        codes = {broke.code for broke in run.broken.get(id, [])}
        asked = run.cancelled.get(id)
        found += Counter(
            {
                "streamed": run.planned[id].streamed,
                "whole": not run.planned[id].streamed,
                "connection broken": "connection" in codes,
                "gone on with Last-Event-ID": any(
                    reading.asked.publishes and reading.asked.start for reading in readings
                ),
                "closed by the client": asked is not None and asked.gateway is not None,
            }
        )
    return found


def _num_tokens(run: Run, id: str) -> int:
    chunks = [record for record in run.final.logs[id] if isinstance(record, TokenChunk)]
    return sum(len(delta.token_ids) for chunk in chunks for delta in chunk.choices)


def _is_resumed(log: Sequence[LogRecord]) -> bool:
    """Tokens of more than one attempt are in it."""
    return len({record.attempt for record in log if isinstance(record, TokenChunk)}) > 1


def percentile(values: Sequence[float], percent: int) -> float:
    """Of sorted values; 0 of none."""
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


def count(run: Run) -> dict[str, Counter[str]]:
    finals = [log[-1] for log in run.final.logs.values() if is_final(log[-1])]
    return {
        "faults": Counter(f"{e.kind} {e.role}" for e in run.pool if isinstance(e, Fault)),
        "crashes": Counter(
            e.what.removeprefix("crash ") for e in run.did if e.what.startswith("crash")
        ),
        "deaths": Counter(
            f"{e.role} {e.code}" for e in run.pool if isinstance(e, Ended) and not e.meant
        ),
        "ends": Counter(
            record.error.code if isinstance(record, Failure) else "finish" for record in finals
        ),
        "broken sessions": Counter(e.code for e in run.clients if isinstance(e, Broke)),
        "payloads": Counter(
            e.what for e in run.did if e.what == "rerendered" or e.what.startswith("read by")
        ),
        "http": _over_http(run),
        "behaviours": Counter(one.behaviour for one in run.planned.values()),
    }
