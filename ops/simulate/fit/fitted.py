"""A simulation with what a run says of its engines, and of the way to them and back.

The run is cut into windows: one is fitted, and the next one is judged. In it, times are drawn from
the window before, because other work on the machine makes times longer for a while.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ops.simulate.engine import Cost, Engine, Request
from ops.simulate.fit.measurement import Answer, Kind
from ops.simulate.fit.trace import to_request
from ops.simulate.routers import SharedQueue
from ops.simulate.simulation import Simulation

WINDOW_S = 1.0


def is_judged(at_s: float) -> bool:
    return int(at_s // WINDOW_S) % 2 == 1


class Samples:
    """Measured values by their windows."""

    def __init__(self, values: Iterable[tuple[float, float]]) -> None:
        """`values` are times of the run, and what was measured then."""
        self._by_window = defaultdict[int, list[float]](list)
        for at_s, value in values:
            self._by_window[_fitted_window(at_s)].append(value)
        self._all = [value for window in self._by_window.values() for value in window]

    def draw(self, at_s: float, rnd: random.Random) -> float:
        """Return one of the values of a window, or of all windows if it has none."""
        return rnd.choice(self._by_window.get(_fitted_window(at_s)) or self._all)


def _fitted_window(at_s: float) -> int:
    return int(at_s // WINDOW_S) // 2


@dataclass(frozen=True, slots=True)
class Fit:
    """What the fitted windows say."""

    cost: Cost
    """Processor time of a step."""
    slowdowns: Mapping[Kind, Samples]
    """How many times longer a step takes."""
    before_s: Samples
    after_s: Samples


class FittedEngine(Engine):
    """An engine whose steps take longer than their processor time."""

    __slots__ = ("simulation", "slowdown")

    simulation: "FittedSimulation"
    slowdown: float

    def plan(self, now_s: float) -> float | None:
        has_prefills = bool(self.prefills)
        self.slowdown = self.simulation.slowdown(self, (has_prefills, self.num_decoding > 0))
        end_s = Engine.plan(self, now_s)
        if end_s is None or not has_prefills:
            return end_s  # A leap's time has the slowdown already.
        return now_s + self.slowdown * (end_s - now_s)

    def _leap_s(self, steps: int) -> float:
        return self.slowdown * Engine._leap_s(self, steps)


class FittedSimulation(Simulation):
    """The requests of a run, of which those in judged windows count."""

    def __init__(
        self, answers: Sequence[Answer], fit: Fit, num_engines: int, block: int, seed: int
    ) -> None:
        self._fit = fit
        self._sent_s: dict[Request, float] = {}
        rnd = random.Random(seed)
        for answer in answers:
            arrived_s = answer.sent_s + fit.before_s.draw(answer.sent_s, rnd)
            self._sent_s[to_request(answer.turn, arrived_s, block)] = answer.sent_s
        requests = sorted(self._sent_s, key=lambda request: request.arrived_s)
        super().__init__(requests, SharedQueue(), num_engines, seed, cost=fit.cost)

    def submit(self, request: Request) -> None:
        # From here on, the request's times are those of its client.
        request.arrived_s = self._sent_s[request]
        super().submit(request)

    def counts(self, request: Request) -> bool:
        return is_judged(request.arrived_s)

    def slowdown(self, engine: Engine, kind: tuple[bool, bool]) -> float:
        prefills, decodes = kind
        is_shared = any(other.steps_ahead for other in self.engines if other is not engine)
        samples = self._fit.slowdowns.get((prefills, is_shared, decodes))
        return 1.0 if samples is None else samples.draw(self.now_s, self.random)

    def _new_engine(self) -> Engine:
        self._num_made += 1
        engine = FittedEngine(self._num_made, self.now_s, self.cost, None)
        engine.simulation, engine.slowdown = self, 1.0
        return engine

    def _settle(self, engine: Engine) -> None:
        figures = self.figures
        num_first, num_last = len(figures.ttft_s), len(figures.answer_s)
        super()._settle(engine)
        after_s = self._fit.after_s.draw(self.now_s, self.random)
        figures.ttft_s[num_first:] = [s + after_s for s in figures.ttft_s[num_first:]]
        figures.answer_s[num_last:] = [s + after_s for s in figures.answer_s[num_last:]]
