"""Rows of the cost of HTTP, computed from the measurements. Pure."""

from collections.abc import Iterator

from ops.bench import burst
from ops.bench.burst import Burst
from ops.harness.samples import Samples

BASE = "nats"
SINGLES = ("transport", "TTFT p50 ms", "p99", "beyond NATS, p50", "median of pairs (95 %)")
BURSTS = (
    "transport", "TTFT p50 ms", "p99", "beyond NATS, p50",
    "tokens/s", "of NATS: median (range)", "CPU ms for 1000 tokens",
)  # fmt: skip


def of_singles(singles: dict[str, Samples]) -> Iterator[tuple[str, ...]]:
    """Compare the seconds to the first token of one request at a time, also pair by pair."""
    base = singles[BASE]
    for transport, times in singles.items():
        pairs = Samples(mine - of_base for mine, of_base in zip(times, base, strict=True))
        low, high = pairs.interval()
        yield (
            transport,
            f"{1000 * times.median:,.1f}",
            f"{1000 * times.p99:,.1f}",
            f"{1000 * (times.median - base.median):+.2f}",
            f"{1000 * pairs.median:+.2f} ({1000 * low:+.2f} to {1000 * high:+.2f})",
        )


def of_bursts(bursts: dict[str, list[Burst]]) -> Iterator[tuple[str, ...]]:
    base = bursts[BASE]
    for transport, runs in bursts.items():
        first_ms = burst.first_ms(runs)
        pairs = zip(runs, base, strict=True)
        shares = Samples(mine.tokens_s / of_base.tokens_s for mine, of_base in pairs)
        yield (
            transport,
            f"{first_ms.median:,.1f}",
            f"{first_ms.p99:,.1f}",
            f"{first_ms.median - burst.first_ms(base).median:+.1f}",
            f"{burst.tokens_s(runs):,.1f}",
            f"{shares.median:.3f} ({min(shares):.3f} to {max(shares):.3f})",
            burst.processor_ms(runs),
        )
