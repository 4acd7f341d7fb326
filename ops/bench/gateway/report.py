"""Tables of what HTTP costs, computed from the measurements. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from rich.table import Table

BASE = "nats"


@dataclass(frozen=True, slots=True)
class Burst:
    """Several requests sent at once, by one transport."""

    first_s: list[float]
    num_tokens: int
    took_s: float
    cpu_s: dict[str, float]
    """Processor seconds during the burst, by process."""

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.took_s


def of_singles(title: str, singles: dict[str, list[float]]) -> Table:
    table = Table(title=f"{title}, {len(singles[BASE])} times", title_justify="left")
    table.add_column("transport")
    for name in ("TTFT p50 ms", "p99", "beyond NATS, p50", "median of pairs (95 %)"):
        table.add_column(name, justify="right")
    base = singles[BASE]
    for transport, times in singles.items():
        pairs = [mine - of_base for mine, of_base in zip(times, base, strict=True)]
        table.add_row(
            transport,
            _ms(median(times)),
            _ms(p99(times)),
            f"{1000 * (median(times) - median(base)):+.2f}",
            _with_interval(pairs),
        )
    return table


def of_bursts(title: str, bursts: dict[str, list[Burst]]) -> Table:
    table = Table(title=f"{title}, {len(bursts[BASE])} times", title_justify="left")
    table.add_column("transport")
    for name in ("TTFT p50 ms", "p99", "beyond NATS, p50", "tokens/s", "of NATS: median (range)"):
        table.add_column(name, justify="right")
    table.add_column("CPU ms for 1000 tokens")
    base = bursts[BASE]
    base_first_s = median(_first_s(base))
    for transport, runs in bursts.items():
        first_s = _first_s(runs)
        pairs = zip(runs, base, strict=True)
        shares = [mine.tokens_s / of_base.tokens_s for mine, of_base in pairs]
        table.add_row(
            transport,
            _ms(median(first_s)),
            _ms(p99(first_s)),
            f"{1000 * (median(first_s) - base_first_s):+.1f}",
            f"{median(run.tokens_s for run in runs):,.1f}",
            f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})",
            _cpu(runs),
        )
    return table


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that contains the median of the distribution in 95 of 100 cases.

    Its ends are 1.96 standard deviations of a binomial distribution from the middle, in ranks.
    """
    ordered = sorted(values)
    rank = max(1, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[rank - 1], ordered[-rank]


def p99(times_s: list[float]) -> float:
    """Return the 99th percentile, interpolated between the two nearest values."""
    return quantiles(times_s, n=100, method="inclusive")[-1] if len(times_s) > 1 else times_s[0]


def _first_s(runs: list[Burst]) -> list[float]:
    return [first_s for run in runs for first_s in run.first_s]


def _cpu(runs: list[Burst]) -> str:
    num_tokens = sum(run.num_tokens for run in runs)
    totals = {name: sum(run.cpu_s[name] for run in runs) for name in runs[0].cpu_s}
    return ", ".join(f"{name} {1e6 * total / num_tokens:.0f}" for name, total in totals.items())


def _with_interval(seconds: Sequence[float]) -> str:
    low, high = interval_of_median(seconds)
    return f"{1000 * median(seconds):+.2f} ({1000 * low:+.2f} to {1000 * high:+.2f})"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
