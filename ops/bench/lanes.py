"""Measure what short steps of the batch lane cost: its tokens a second, and what they are good for.

The engine core of the demo's model always has 32 requests of the batch lane, and twice a second a
short interactive one. With the limits of `workers.engine.core.step_cost` on the batch lane and
without them in turn, each turn on the same core and with the same requests. The figures are the
batch lane's tokens a second, the interactive requests' time in the engine, and both as ratios.

    python -m ops.bench.lanes [--model FOLDER] [--turns 4] [--seconds 10]
"""

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from unittest import mock

from rich.console import Console
from rich.table import Table

from ops.bench.peers import machine
from shared.config import EngineConfig, ModelConfig
from shared.protocol.sampling import SamplingParams
from workers.cli import settings
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.core.step_cost import max_batch_tokens
from workers.engine.loader import load
from workers.engine.main import build_core

NUM_BATCH = 32
BATCH_PROMPT, BATCH_ANSWER = 200, 100
PROMPT, ANSWER = 16, 8
PERIOD_S = 0.5
MAX_MODEL_LEN = 512
WARM_UP_S = 3.0
ON, OFF = "with the limits", "without them"


@dataclass
class Turn:
    """What was served in one turn, or in several."""

    seconds: float = 0.0
    num_batch_tokens: int = 0
    took_s: list[float] = field(default_factory=list)
    """Times of interactive requests, from their arrival to their last token."""

    def add(self, other: "Turn") -> None:
        self.seconds += other.seconds
        self.num_batch_tokens += other.num_batch_tokens
        self.took_s += other.took_s

    @property
    def batch_rate(self) -> float:
        return self.num_batch_tokens / self.seconds

    @property
    def p95_s(self) -> float:
        return quantiles(self.took_s, n=20, method="inclusive")[-1]


class Load:
    """Requests of both lanes, the same for each number."""

    def __init__(self, core: EngineCore, number: int) -> None:
        self._core = core
        self._rng = random.Random(number)
        self._arrived_s: dict[str, float] = {}
        self._open: set[str] = set()
        self._num_added = 0

    def run(self, lasts_s: float) -> Turn:
        """Serve for some seconds, and leave the core without requests."""
        turn, began_s = Turn(), time.perf_counter()
        next_s = began_s
        while (now_s := time.perf_counter()) < began_s + lasts_s:
            while len(self._open) < NUM_BATCH:
                self._open.add(self._add("batch", BATCH_PROMPT, BATCH_ANSWER))
            if now_s >= next_s:
                # It would have come in the middle of a step.
                self._arrived_s[self._add("interactive", PROMPT, ANSWER)] = next_s
                next_s += PERIOD_S
            self._step(turn)
        turn.seconds = time.perf_counter() - began_s
        for request_id in (*self._open, *self._arrived_s):
            self._core.cancel(request_id)
        return turn

    def _add(self, lane: str, num_prompt: int, num_tokens: int) -> str:
        self._num_added += 1
        request_id = f"{lane}-{self._num_added}"
        prompt = [self._rng.randrange(1, 256) for _ in range(num_prompt)]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self._core.add(EngineRequest(request_id, prompt, [], params, lane=lane))
        return request_id

    def _step(self, turn: Turn) -> None:
        began_s = time.perf_counter()
        outputs = self._core.step()
        ended_s = time.perf_counter()
        self._core.observe_time(ended_s - began_s)
        for output in outputs:
            if output.request_id in self._open:
                turn.num_batch_tokens += sum(len(delta.token_ids) for delta in output.choices)
            if output.usage is not None:
                self._open.discard(output.request_id)
                if (arrived_s := self._arrived_s.pop(output.request_id, None)) is not None:
                    turn.took_s.append(ended_s - arrived_s)


def measure(core: EngineCore, num_turns: int, lasts_s: float) -> dict[str, Turn]:
    found = {ON: Turn(), OFF: Turn()}
    Load(core, -1).run(WARM_UP_S)
    for number in range(num_turns):
        for name in (ON, OFF) if number % 2 == 0 else (OFF, ON):
            limit = max_batch_tokens if name == ON else _no_limit
            with mock.patch("workers.engine.core.scheduler.max_batch_tokens", limit):
                found[name].add(Load(core, number).run(lasts_s))
    return found


def _no_limit(*_: object) -> None:
    pass


def report(found: dict[str, Turn]) -> Table:
    names = ("batch tokens/s", "ratio", "interactive p50", "p95", "ratio of p95")
    table = Table("steps of the batch lane", *names)
    base = found[OFF]
    for name, turn in found.items():
        table.add_row(
            name,
            f"{turn.batch_rate:,.0f}",
            f"{turn.batch_rate / base.batch_rate:.2f}",
            f"{1e3 * median(turn.took_s):.0f} ms",
            f"{1e3 * turn.p95_s:.0f} ms",
            f"{turn.p95_s / base.p95_s:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=settings.DEMO_MODEL)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    given = parser.parse_args()
    engine = EngineConfig(prefix_caching=False)
    model = ModelConfig(str(given.model.absolute()), max_model_len=MAX_MODEL_LEN)
    core = build_core(load(model, engine), engine)
    console = Console()
    with machine.alone():
        console.print(report(measure(core, given.turns, given.seconds)))


if __name__ == "__main__":
    main()
