"""Measure both lanes of an engine next to each other: first tokens, gaps, and tokens of the bulk.

The engine core always has requests of the batch lane, and twice a second an interactive request.
Every round has a turn of each lane alone, and a turn of both for each value of
`engine.interactive_slowdown`. The figures are compared with a lane alone in the same run. The last
column compares the bulk with the rate of the batch lane alone in the time in which interactive
requests alone leave the engine idle.

    python -m ops.bench.lanes [--model FOLDER] [--slowdowns 1.1 1.25 1.5 2 3] [--rounds 4]

On a machine with other work, `--processor-time` uses one thread, and counts its processor time.
"""

import argparse
import itertools
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace

from ops.bench.models import write_random_llama
from ops.harness import machine
from ops.harness.samples import Samples, in_turns
from ops.harness.tables import print_table
from shared.config.schema import EngineConfig, ModelConfig
from shared.protocol.sampling import SamplingParams
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.settings import DEMO_MODEL

RANDOM_MODEL = "random-135m"
PERIOD_S = 0.5
MAX_MODEL_LEN = 1024
WARM_UP_S = 4.0
INTERACTIVE, BATCH = "interactive", "batch"


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and answers."""

    prompt: int
    answer: int


@dataclass(frozen=True)
class Workload:
    bulk: Sizes
    num_bulk: int
    """Requests of the batch lane at each time."""
    interactive: Sizes


class Clock:
    """Time on the wall, or of the processor with pauses."""

    def __init__(self, is_processor: bool) -> None:
        self._is_processor = is_processor
        self._paused_s = 0.0

    def now(self) -> float:
        return time.process_time() + self._paused_s if self._is_processor else time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        pause_s = max(0.0, time_s - self.now())
        if self._is_processor:
            self._paused_s += pause_s
        else:
            time.sleep(pause_s)


@dataclass(frozen=True)
class Setup:
    lanes: frozenset[str]
    slowdown: float

    @property
    def name(self) -> str:
        return f"both, {self.slowdown:g}" if len(self.lanes) == 2 else f"{min(self.lanes)} alone"


@dataclass
class Figures:
    """Figures of the turns of one setup."""

    elapsed_s: float = 0.0
    busy_s: float = 0.0
    num_bulk_tokens: int = 0
    first_ms: Samples = field(default_factory=Samples)
    gap_ms: Samples = field(default_factory=Samples)

    @property
    def bulk_rate(self) -> float:
        return self.num_bulk_tokens / self.elapsed_s


class Turn:
    """One turn of a core, with requests that are the same for each number."""

    def __init__(self, core: EngineCore, workload: Workload, clock: Clock, number: int) -> None:
        self._core, self._workload, self._clock = core, workload, clock
        self._rng = random.Random(number)
        self._bulk: set[str] = set()
        self._last_s: dict[str, float] = {}
        """Time of the last token of each interactive request, or of its arrival."""
        self._begun: set[str] = set()
        self._ids = itertools.count()

    def run(self, lanes: frozenset[str], duration_s: float, figures: Figures) -> None:
        """Serve requests, and leave the core without any."""
        began_s = self._clock.now()
        due_s = began_s + PERIOD_S * self._rng.random()
        while (now_s := self._clock.now()) < began_s + duration_s:
            while BATCH in lanes and len(self._bulk) < self._workload.num_bulk:
                self._bulk.add(self._add(BATCH, self._workload.bulk))
            while INTERACTIVE in lanes and now_s >= due_s:
                # It has arrived in the middle of a step.
                self._last_s[self._add(INTERACTIVE, self._workload.interactive)] = due_s
                due_s += PERIOD_S
            if self._core.has_work:
                self._step(figures)
            else:
                self._clock.wait_until(due_s)
        figures.elapsed_s += self._clock.now() - began_s
        for request_id in (*self._bulk, *self._last_s):
            self._core.cancel(request_id)

    def _add(self, lane: str, sizes: Sizes) -> str:
        request_id = f"{lane}-{next(self._ids)}"
        prompt = [self._rng.randrange(3, 250) for _ in range(sizes.prompt)]
        sampling = SamplingParams(temperature=0, max_tokens=sizes.answer, ignore_eos=True)
        self._core.add(EngineRequest(request_id, prompt, [], sampling, lane=lane))
        return request_id

    def _step(self, figures: Figures) -> None:
        began_s = self._clock.now()
        outputs = self._core.step()
        ended_s = self._clock.now()
        self._core.observe_time(ended_s - began_s)
        figures.busy_s += ended_s - began_s
        for output in outputs:
            name = output.request_id
            if name in self._bulk:
                figures.num_bulk_tokens += sum(len(delta.token_ids) for delta in output.choices)
                if output.usage is not None:
                    self._bulk.remove(name)
                continue
            samples = figures.gap_ms if name in self._begun else figures.first_ms
            samples.append(1000 * (ended_s - self._last_s[name]))
            self._begun.add(name)
            self._last_s[name] = ended_s
            if output.usage is not None:
                del self._last_s[name]


def measure(
    cores: dict[Setup, EngineCore],
    workload: Workload,
    clock: Clock,
    rounds: int,
    duration_s: float,
) -> dict[Setup, Figures]:
    for setup, core in cores.items():
        Turn(core, workload, clock, -1).run(setup.lanes, WARM_UP_S, Figures())
    figures = {setup: Figures() for setup in cores}
    for number, setup in in_turns(list(cores), rounds):
        turn = Turn(cores[setup], workload, clock, number)
        turn.run(setup.lanes, duration_s, figures[setup])
    return figures


def report(figures: dict[Setup, Figures]) -> None:
    alone, bulk, *_ = figures.values()
    left_rate = bulk.bulk_rate * (1 - alone.busy_s / alone.elapsed_s)
    rows = []
    for setup, each in figures.items():
        row = [setup.name]
        for samples, base in ((each.first_ms, alone.first_ms), (each.gap_ms, alone.gap_ms)):
            row += compared(samples, base) if samples else ["", ""]
        if each.num_bulk_tokens:
            rates = f"{each.bulk_rate:,.0f}", f"{each.bulk_rate / bulk.bulk_rate:.2f}"
            row += [*rates, f"{each.bulk_rate / left_rate:.2f}" if each is not bulk else ""]
        rows.append(row)
    columns = ["lanes, slowdown", "first token p50 / p95 / p99, ms", "of alone"]
    columns += ["gap p50 / p95 / p99, ms", "of alone"]
    columns += ["bulk tokens/s", "of alone", "of the time left"]
    print_table("Both lanes of an engine", columns, rows)


def compared(samples: Samples, base: Samples) -> list[str]:
    """Return the percentiles of samples, and their ratios to other samples."""
    values = [samples.median, samples.p95, samples.p99]
    ratios = [a / b for a, b in zip(values, (base.median, base.p95, base.p99), strict=True)]
    return [
        " / ".join(f"{value:.0f}" for value in values),
        " / ".join(f"{ratio:.2f}" for ratio in ratios),
    ]


def sizes(text: str) -> Sizes:
    prompt, answer = map(int, text.split(","))
    return Sizes(prompt, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEMO_MODEL), help=f"a folder, or {RANDOM_MODEL}")
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1.1, 1.25, 1.5, 2.0, 3.0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="time of each turn")
    parser.add_argument("--bulk", type=sizes, default=Sizes(64, 32), metavar="PROMPT,ANSWER")
    parser.add_argument("--interactive", type=sizes, default=Sizes(64, 32), metavar="PROMPT,ANSWER")
    parser.add_argument("--at-once", type=int, default=32, help="requests of the batch lane")
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    if options.processor_time:
        torch.set_num_threads(1)
    workload = Workload(options.bulk, options.at_once, options.interactive)
    with machine.alone(), tempfile.TemporaryDirectory() as folder:
        path = options.model
        if path == RANDOM_MODEL:
            path = folder
            write_random_llama(Path(folder), DEMO_MODEL)
        engine = EngineConfig(prefix_caching=False, kv_cache_mib=192)
        loaded = load(ModelConfig(str(Path(path).absolute()), max_model_len=MAX_MODEL_LEN), engine)
        # Each setup has its own core, because a core expects more interactive requests for a while.
        both = frozenset((INTERACTIVE, BATCH))
        setups = [Setup(frozenset((lane,)), options.slowdowns[0]) for lane in (INTERACTIVE, BATCH)]
        setups += [Setup(both, slowdown) for slowdown in options.slowdowns]
        cores = {
            setup: build_core(loaded, replace(engine, interactive_slowdown=setup.slowdown))
            for setup in setups
        }
        clock = Clock(options.processor_time)
        report(measure(cores, workload, clock, options.rounds, options.seconds))


if __name__ == "__main__":
    main()
