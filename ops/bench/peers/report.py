"""Report of a run: Pagemill against the best peer, each peer alone, and differing answers."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ops.bench.peers.floors import Limits
from ops.bench.peers.records import Machine, Row
from ops.bench.peers.roster import BUS, OURS
from ops.harness.tables import console, print_table

RATIOS = (
    "model", "workload", "ours", "over the bus", "best peer", "",
    "ratio", "of floor", "TTFT p50 s", "peer's",
)  # fmt: skip
ALL = (
    "model", "workload", "peer", "tokens/s", "wall s", "of floor",
    "TTFT p50 / max s", "start s", "peak MB", "other CPU",
)  # fmt: skip
PHASES = ("model", "workload", "phase", "ms", "share")


def print_report(machine: Machine, rows: Sequence[Row]) -> None:
    console.print(describe(machine))
    if any(row.peer == OURS for row in rows):
        title = "ours against the best peer: tokens put out in a second"
        print_table(title, RATIOS, _ratios(rows, machine.limits), num_texts=2)
    print_table("all peers", ALL, _all(rows, machine.limits), num_texts=3)
    if any(r.phases for row in rows for r in row.repetitions):
        print_table("where our time goes", PHASES, _phases(rows), num_texts=3)
    for line in differences(rows):
        console.print(line)


def describe(machine: Machine) -> str:
    limits = machine.limits
    rates = ", ".join(
        f"{rate / 1e9:,.0f} at {rows} rows" for rows, rate in sorted(limits.gemm_flops_s.items())
    )
    return (
        f"{machine.date}, {machine.cpu}, {machine.threads} threads."
        f" Reads {limits.read_bytes_s / 1e9:.1f} GB/s; bf16 products, GFLOP/s: {rates}."
    )


def differences(rows: Sequence[Row]) -> list[str]:
    """Compare where peers' first tokens differ from ours; in bfloat16 two tokens may tie."""
    lines = []
    for (model, workload), group in by_workload(rows):
        first, *others = group
        for row in others:
            lines += [
                f"{model} {workload}: {row.peer} differs from {first.peer} in request {number}"
                f" from token {place} on ({theirs} for {ours})"
                for number, place, ours, theirs in _partings(first.first_tokens, row.first_tokens)
            ]
    return lines


def by_workload(rows: Sequence[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    """Return the rows in the order of the run, with ours first in each group."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.workload), []).append(row)
    return [(key, sorted(group, key=lambda row: row.peer != OURS)) for key, group in groups.items()]


def _partings(
    ours: list[list[int]], theirs: list[list[int]]
) -> Iterator[tuple[int, int, int | None, int | None]]:
    """Return, for each request that differs, its number, the first place, and both tokens there."""
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        for place, (a, b) in enumerate(zip_longest(*pair)):
            if a != b:
                yield number, place, a, b
                break


def _ratios(rows: Sequence[Row], limits: Limits) -> Iterator[tuple[str, ...]]:
    for (model, workload), group in by_workload(rows):
        by_peer = {row.peer: row for row in group}
        ours, bus = by_peer.pop(OURS, None), by_peer.pop(BUS, None)
        if ours is None:
            continue
        best = min(by_peer.values(), key=lambda row: row.wall_s, default=None)
        theirs = ("", "", "", "")
        if best is not None:
            ratio = f"{ours.speed_against(best):.2f}"
            theirs = (f"{best.tokens_s:.1f}", best.peer, ratio, f"{best.ttft_s:.3f}")
        yield (
            model,
            workload,
            f"{ours.tokens_s:.1f}",
            f"{bus.tokens_s:.1f} ({bus.speed_against(ours):.2f})" if bus else "",
            *theirs[:3],
            f"{ours.share_of_floor(limits):.0%}",
            f"{ours.ttft_s:.3f}",
            theirs[3],
        )


def _all(rows: Sequence[Row], limits: Limits) -> Iterator[tuple[str, ...]]:
    for _, group in by_workload(rows):
        for row in sorted(group, key=lambda row: row.wall_s):
            yield (
                row.model,
                row.workload,
                row.peer,
                f"{row.tokens_s:.1f}",
                " ".join(f"{r.wall_s:.2f}" for r in row.repetitions),
                f"{row.share_of_floor(limits):.0%}",
                f"{row.ttft_s:.3f} / {row.last_ttft_s:.3f}",
                f"{row.start_s:.1f}",
                f"{row.peak_bytes / 1e6:,.0f}",
                f"{row.other_cpu:.0%}",
            )


def _phases(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Return the phases of the last repetition; the rest of its time is outside the steps."""
    for row in rows:
        last = row.repetitions[-1]
        if not last.phases:
            continue
        outside = {"outside the steps": last.wall_s - sum(last.phases.values())}
        for phase, took_s in sorted((last.phases | outside).items(), key=lambda each: -each[1]):
            share = f"{took_s / last.wall_s:.1%}"
            yield row.model, row.workload, phase, f"{1000 * took_s:.1f}", share
