"""The results of a run as lines of its file: one for the machine, then one for each row."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from ops.bench.peers.floors import Limits, Shape, Work, floor_s
from ops.bench.peers.protocol import Result


@dataclass(frozen=True, slots=True)
class Repetition:
    wall_s: float
    first_s: list[float]
    """Seconds by request, as in the next two."""
    last_s: list[float]
    num_tokens: list[int]
    other_cpu: float
    """Share of the machine that others used meanwhile."""
    phases: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Result, other_cpu: float) -> "Repetition":
        return cls(
            result.wall_s,
            [answer.first_s for answer in result.answers],
            [answer.last_s for answer in result.answers],
            [len(answer.token_ids) for answer in result.answers],
            other_cpu,
            result.phases,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a peer at a workload on a model."""

    model: str
    workload: str
    peer: str
    shape: Shape
    work: Work
    repetitions: list[Repetition]
    start_s: float
    peak_bytes: int
    """Peak memory since the start of the peer."""
    first_tokens: list[list[int]]
    """Token ids of the last repetition's first requests."""

    @property
    def wall_s(self) -> float:
        return median(r.wall_s for r in self.repetitions)

    @property
    def tokens_s(self) -> float:
        """Return tokens per second, from submission to the last token."""
        return self.work.num_requests * self.work.max_tokens / self.wall_s

    @property
    def ttft_s(self) -> float:
        return median(first_s for r in self.repetitions for first_s in r.first_s)

    @property
    def last_ttft_s(self) -> float:
        return median(max(r.first_s) for r in self.repetitions)

    @property
    def other_cpu(self) -> float:
        return max(r.other_cpu for r in self.repetitions)

    def share_of_floor(self, limits: Limits) -> float:
        return floor_s(self.shape, self.work, limits) / self.wall_s

    def speed_against(self, other: "Row") -> float:
        """Return the ratio of speed to `other`, which took turns with this peer."""
        pairs = zip(self.repetitions, other.repetitions, strict=True)
        return median(theirs.wall_s / ours.wall_s for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    threads: int
    date: str
    limits: Limits


def write(file: Path, machine: Machine, rows: list[Row]) -> None:
    lines = [msgspec.json.encode(value) for value in (machine, *rows)]
    file.write_bytes(b"\n".join(lines) + b"\n")


def read(file: Path) -> tuple[Machine, list[Row]]:
    first, *others = file.read_bytes().splitlines()
    rows = [msgspec.json.decode(line, type=Row) for line in others]
    return msgspec.json.decode(first, type=Machine), rows
