"""Plot a run as rooflines: the speed of each phase, against the limits of the machine.

    python -m ops.bench.peers.plot FILE [PLOT.svg]

A point is a phase of a workload by one peer: its operations for each byte of weights that has to be
read, and its operations per second. The sloping line is the limit by reading, the level line the
limit by arithmetic. The prefill lasts until the last first token, and the decoding follows. Only
the necessary operations count, so a peer that computes more appears slower.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ops.bench.peers import floors, records
from ops.bench.peers.records import Machine, Repetition, Row

DEFAULT = Path(__file__).parents[3] / "docs" / "roofline.svg"
MARKERS = {"single": "o", "batch32": "s", "prefix16": "^", "mm16": "D"}
INTENSITIES = (0.5, 8000.0)
# A shorter phase consists mostly of other work.
MIN_DECODED = 0.05

Fill = Literal["full", "none"]


@dataclass(frozen=True, slots=True)
class Point:
    phase: str
    intensity: float
    """Operations for each byte read."""
    flops_s: float


def points(row: Row) -> Iterator[Point]:
    last = row.repetitions[-1]
    border_s = max(last.first_s)
    prefill, decode = floors.prefill(row.shape, row.work), floors.decode(row.shape, row.work)
    after = share_after(last, border_s)
    # Some requests decode while others wait for their first token.
    flops = prefill.flops + (1 - after) * decode.flops
    yield Point("prefill", flops / prefill.read_bytes, flops / border_s)
    if after > MIN_DECODED:
        rate = after * decode.flops / (max(last.last_s) - border_s)
        yield Point("decode", decode.flops / decode.read_bytes, rate)


def share_after(repetition: Repetition, border_s: float) -> float:
    """Return the share of tokens that came after `border_s`; each request's are spread evenly."""
    after = total = 0.0
    for first_s, last_s, count in zip(
        repetition.first_s, repetition.last_s, repetition.num_tokens, strict=True
    ):
        total += count - 1
        if last_s > first_s:
            after += (count - 1) * (last_s - max(first_s, border_s)) / (last_s - first_s)
    return after / total if total else 0.0


def plot(machine: Machine, rows: list[Row], file: Path) -> None:
    models = list(dict.fromkeys(row.model for row in rows))
    peers = list(dict.fromkeys(row.peer for row in rows))
    colours = {peer: f"C{number}" for number, peer in enumerate(peers)}
    # Text stays text, and the same input gives the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "pagemill"}
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(6 * len(models), 5), sharey=True, squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=True):
        _draw_limits(axis, machine)
        for row in (row for row in rows if row.model == model):
            for point in points(row):
                axis.plot(
                    point.intensity,
                    point.flops_s / 1e9,
                    MARKERS[row.workload],
                    color=colours[row.peer],
                    fillstyle="full" if point.phase == "decode" else "none",
                )
        axis.set(title=model, xlabel="operations for each byte of weights", xscale="log")
    axes[0][0].set(ylabel="GFLOP/s", yscale="log")
    figure.legend(handles=_keys(colours, rows), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(f"{machine.cpu}, {machine.threads} threads, {machine.date}", fontsize=9)
    figure.subplots_adjust(bottom=0.25)
    figure.savefig(file, metadata={"Date": None})


def _draw_limits(axis: Axes, machine: Machine) -> None:
    limits = machine.limits
    peak = limits.peak_flops_s
    corner = peak / limits.read_bytes_s
    xs = [INTENSITIES[0], corner, max(INTENSITIES[1], 2 * corner)]
    ys = [xs[0] * limits.read_bytes_s, peak, peak]
    axis.plot(xs, [y / 1e9 for y in ys], color="black", linewidth=1)
    reading, arithmetic = f"{limits.read_bytes_s / 1e9:.1f} GB/s", f"{peak / 1e9:,.0f} GFLOP/s"
    for text, x, y, offset in (
        (reading, xs[0], ys[0], (12, 0)),
        (arithmetic, corner, peak, (8, 4)),
    ):
        axis.annotate(text, (x, y / 1e9), offset, textcoords="offset points", fontsize=8)


def _keys(colours: dict[str, str], rows: list[Row]) -> list[Line2D]:
    def key(label: str, marker: str, colour: str, fill: Fill) -> Line2D:
        return Line2D(
            [], [], label=label, marker=marker, color=colour, linestyle="", fillstyle=fill
        )

    peers = [key(peer, "s", colour, "full") for peer, colour in colours.items()]
    names = dict.fromkeys(row.workload for row in rows)
    workloads = [key(name, MARKERS[name], "gray", "full") for name in names]
    phases = [key("decode", "o", "gray", "full"), key("prefill", "o", "gray", "none")]
    return [*peers, *workloads, *phases]


if __name__ == "__main__":
    plot(*records.read(Path(sys.argv[1])), Path(sys.argv[2]) if sys.argv[2:] else DEFAULT)
