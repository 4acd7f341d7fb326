"""What a run writes down of its requests and of the steps of its engines, in files of JSON lines.

Times are those of the monotonic clock, which the processes of a machine share, less the time at
which the run began.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ops.simulate.fit.trace import Turn

Kind = tuple[bool, bool, bool]


class Step(Struct, frozen=True, tag="step"):
    """One step of an engine."""

    began_s: float
    ended_s: float
    cpu_s: float
    """Processor time of the thread that runs the steps."""
    tokens: int
    context: int
    """Tokens that the decoding sequences read."""
    prefills: bool
    """Whether the step computes a part of a prompt."""
    is_shared: bool = False
    """Whether another engine was in a step when this one began."""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def kind(self) -> Kind:
        """What decides how much longer than its processor time a step takes."""
        return self.prefills, self.is_shared, self.context > 0


class FirstToken(Struct, frozen=True, tag="first"):
    """The first token of a request, in its engine."""

    request_id: str
    added_s: float
    """When steps could begin with the request."""
    ended_s: float
    """When the step that sampled the token had ended."""


Line = Step | FirstToken
_DECODER = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of a request, and what its engine wrote down."""

    turn: Turn
    sent_s: float
    first_s: float
    ended_s: float
    cached_tokens: int
    in_engine: FirstToken

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def before_s(self) -> float:
        """Time from the client to the engine: coordinator, renderer, and three queues."""
        return self.in_engine.added_s - self.sent_s

    @property
    def after_s(self) -> float:
        """Time from the step of the first token to the client: the token log."""
        return self.first_s - self.in_engine.ended_s


def read_lines(folder: Path, began_s: float) -> tuple[list[Step], dict[str, FirstToken]]:
    """Return the steps of all engines since `began_s`, and first tokens by their requests."""
    engines, first = list[list[Step]](), dict[str, FirstToken]()
    for file in sorted(folder.glob("*.jsonl")):
        engines.append([])
        for text in file.read_bytes().splitlines():
            line = _DECODER.decode(text)
            line = replace(line, ended_s=line.ended_s - began_s)
            if isinstance(line, FirstToken):
                first[line.request_id] = replace(line, added_s=line.added_s - began_s)
            elif line.began_s >= began_s:
                engines[-1].append(replace(line, began_s=line.began_s - began_s))
    return list(mark_shared(engines)), first


def mark_shared(engines: Sequence[Sequence[Step]]) -> Iterator[Step]:
    """Yield the steps of all engines, with what each knows of the other engines."""
    began_s = [[step.began_s for step in steps] for steps in engines]
    for number, steps in enumerate(engines):
        others = [other for other in range(len(engines)) if other != number]
        for step in steps:
            last = [(other, bisect_right(began_s[other], step.began_s) - 1) for other in others]
            is_shared = any(i >= 0 and engines[o][i].ended_s > step.began_s for o, i in last)
            yield replace(step, is_shared=is_shared)
