"""Autoscalers of a simulated pool: the product's policy, KEDA, one that knows the future."""

import math
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from ops.simulate.engine import Cost, Request
from ops.simulate.simulation import Simulation
from shared.scaling.memory import Learned, Memory, PoolMemory
from shared.scaling.policy import decide
from shared.scaling.pools import (
    PoolFigures,
    PoolSettings,
    PromptFigures,
    ScalingSettings,
    WorkerLoad,
    WorkFigures,
    choose_victims,
)

COLD_S = 45.0
"""Time of an engine's start."""
RATE_S = 30.0
"""Time in which arriving tokens are counted."""
POOL = "engine"
NOTHING_LEARNED = Learned()


class OwnPolicy:
    """Runs `shared.scaling` with figures like those from the broker and the heartbeats."""

    def __init__(
        self,
        settings: PoolSettings,
        cold_s: float = COLD_S,
        period_s: float = 2.0,
        learned: Learned = NOTHING_LEARNED,
    ) -> None:
        """`cold_s` is the time of a start, `period_s` the time between two looks."""
        self.period_s = period_s
        self._cold_s = cold_s
        self._settings = ScalingSettings({POOL: settings})
        self._memory: Memory = {POOL: PoolMemory(target=0, learned=learned)}
        self._num_ready = self._num_ended = 0
        self._computed: dict[int, tuple[int, float]] = {}
        """Computed prompt tokens and the time of their steps, by number of the engine."""
        self._arrived = deque[tuple[float, int, int]]()
        """Times of the last looks, with the requests and prompt tokens that had arrived."""

    def look(self, simulation: Simulation) -> None:
        now_s, waiting = simulation.now_s, simulation.waiting()
        oldest_s = min((request.arrived_s for request in waiting), default=now_s)
        num_ready = simulation.figures.num_started - len(simulation.starting)
        figures = PoolFigures(
            len(waiting),
            simulation.num_in_flight() - len(waiting),
            now_s - oldest_s,
            len(simulation.live),
            {str(e.number): now_s - at_s for e, at_s in simulation.starting.items()},
            num_draining=len(simulation.engines) - len(simulation.live),
            cold_starts_s=(self._cold_s,) * (num_ready - self._num_ready),
            work=self._work(simulation),
        )
        self._num_ready = num_ready
        decisions, self._memory = decide(self._settings, {POOL: figures}, self._memory, now_s)
        resize(simulation, decisions[POOL].target, self._cold_s)

    def _work(self, simulation: Simulation) -> WorkFigures | None:
        """Return the arrivals of the last RATE_S, and times and speed since the start."""
        for engine in simulation.engines:
            self._computed[engine.number] = engine.num_prefilled, engine.prefill_s
        now_s, figures = simulation.now_s, simulation.figures
        self._arrived.append((now_s, simulation.num_arrived, simulation.num_arrived_tokens))
        while self._arrived[0][0] < now_s - RATE_S:
            self._arrived.popleft()
        if not figures.num_ended:
            return None
        num_arrived, num_tokens = (
            (last - first) / RATE_S
            for first, last in zip(self._arrived[0][1:], self._arrived[-1][1:], strict=True)
        )
        num_computed = sum(num for num, _ in self._computed.values())
        computed_s = sum(prefill_s for _, prefill_s in self._computed.values())
        prompts = PromptFigures(
            simulation.num_waiting_tokens(), num_tokens, num_computed / computed_s
        )
        num_ended, self._num_ended = figures.num_ended - self._num_ended, figures.num_ended
        return WorkFigures(num_arrived, figures.served_s / figures.num_ended, num_ended, prompts)


class Keda:
    """KEDA's scaler and the autoscaler of Kubernetes, by default with their default times."""

    def __init__(
        self, settings: PoolSettings, period_s: float = 30.0, window_s: float = 300.0
    ) -> None:
        """Engines are kept for the largest need within `window_s`."""
        self.period_s = period_s
        self._settings = settings
        self._window_s = window_s
        self._wants: deque[tuple[float, int]] = deque()

    def look(self, simulation: Simulation) -> None:
        now_s, in_flight = simulation.now_s, simulation.num_in_flight()
        want = min(self._settings.max, math.ceil(in_flight / self._settings.per_engine))
        self._wants.append((now_s, want))
        while self._wants[0][0] < now_s - self._window_s:
            self._wants.popleft()
        num_present = len(simulation.live) + len(simulation.starting)
        kept = min(num_present, max(want for _, want in self._wants))
        resize(simulation, max(want, kept), COLD_S)


class Oracle:
    """Knows the future requests: engines are ready when they are needed, and go when no engine is
    needed again within the time of a start."""

    period_s = 2.0

    def __init__(self, settings: PoolSettings, requests: Sequence[Request], cost: Cost) -> None:
        """The load is the number of requests in flight if each is computed at once.

        An engine computes with `per_engine` requests in 80 % of its time.
        """
        self._settings = settings
        changes = []
        for request in requests:
            context = settings.per_engine * (request.prompt + request.answer / 2)
            step_s = cost.step_s + cost.token_s * settings.per_engine + cost.context_s * context
            answer_s = cost.token_s * request.prompt + request.answer * step_s
            changes += [(request.arrived_s, 1), (request.arrived_s + answer_s / 0.8, -1)]
        changes.sort()
        self._loads = list(accumulate((change for _, change in changes), initial=0))
        self._times_s = [at_s for at_s, _ in changes]

    def look(self, simulation: Simulation) -> None:
        first = bisect(self._times_s, simulation.now_s)
        last = bisect(self._times_s, simulation.now_s + COLD_S + self.period_s)
        load = max(min(1, simulation.num_in_flight()), *self._loads[first : last + 1])
        need = math.ceil(load / self._settings.per_engine)
        resize(simulation, min(self._settings.max, need), COLD_S)


def resize(simulation: Simulation, target: int, cold_s: float) -> None:
    """Start or drain engines, so that `target` are ready or start."""
    num_present = len(simulation.live) + len(simulation.starting)
    for _ in range(target - num_present):
        simulation.start_engine(cold_s)
    _drain(simulation, num_present - target)
    size = simulation.now_s, len(simulation.live), simulation.num_in_flight()
    simulation.figures.sizes.append(size)


def _drain(simulation: Simulation, count: int) -> None:
    by_name = {str(engine.number): engine for engine in simulation.live}
    loads = [WorkerLoad(name, engine.num_held) for name, engine in by_name.items()]
    for name in choose_victims(loads, count):
        simulation.drain(by_name[name])
