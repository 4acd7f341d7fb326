"""Requests that are sent at once: their times, tokens and processor time."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ops.harness.machine import processor_s
from ops.harness.samples import Samples


@dataclass(slots=True)
class Burst:
    """One burst of requests by one transport."""

    first_s: list[float] = field(default_factory=list)
    """Seconds to the first token of each request."""
    num_tokens: int = 0
    took_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor seconds during the burst, by process."""
    num_records: int = 0

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.took_s

    @contextlib.contextmanager
    def timed(self, pids: Mapping[str, int]) -> Iterator[None]:
        """Measure the time of a block, and the processor time of processes and of this one."""
        before_s, client_s, began_s = processor_s(pids), time.process_time(), time.perf_counter()
        yield
        self.took_s = time.perf_counter() - began_s
        self.cpu_s = {name: s - before_s[name] for name, s in processor_s(pids).items()}
        self.cpu_s["client"] = time.process_time() - client_s


def first_ms(bursts: Sequence[Burst]) -> Samples:
    """Return the milliseconds to the first token of all requests."""
    return Samples(1000 * first_s for burst in bursts for first_s in burst.first_s)


def tokens_s(bursts: Sequence[Burst]) -> float:
    return Samples(burst.tokens_s for burst in bursts).median


def processor_ms(bursts: Sequence[Burst]) -> str:
    """Return the processor milliseconds of each process for a thousand tokens, in words."""
    num_tokens = sum(burst.num_tokens for burst in bursts)
    totals = {name: sum(burst.cpu_s[name] for burst in bursts) for name in bursts[0].cpu_s}
    return ", ".join(f"{name} {1e6 * total / num_tokens:.0f}" for name, total in totals.items())
