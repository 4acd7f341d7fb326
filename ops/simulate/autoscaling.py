"""Autoscalers of a simulated pool: the product's own policy, and KEDA with its defaults."""

import math
from collections import deque

from ops.simulate.simulation import Simulation
from shared.scaling.memory import Memory
from shared.scaling.policy import decide
from shared.scaling.pools import (
    PoolFigures,
    PoolSettings,
    ScalingSettings,
    WorkerLoad,
    choose_victims,
)

COLD_S = 45.0
"""Time of an engine's start."""
WINDOW_S = 300.0
"""KEDA keeps engines for the largest need within this time."""
POOL = "engine"


class OwnPolicy:
    """Runs `shared.scaling` with figures like those from the broker and the heartbeats."""

    def __init__(
        self, settings: PoolSettings, cold_s: float = COLD_S, period_s: float = 2.0
    ) -> None:
        """`cold_s` is the time of a start, `period_s` the time between two looks."""
        self.period_s = period_s
        self._cold_s = cold_s
        self._settings = ScalingSettings({POOL: settings})
        self._memory: Memory = {}

    def look(self, simulation: Simulation) -> None:
        now_s, oldest_s = simulation.now_s, simulation.oldest_s()
        pending = simulation.num_pending() + sum(len(e.waiting) for e in simulation.engines)
        in_flight = simulation.num_in_flight()
        figures = PoolFigures(
            pending,
            in_flight - pending,
            0.0 if oldest_s is None else now_s - oldest_s,
            len(simulation.live),
            {str(e.number): now_s - at_s for e, at_s in simulation.starting.items()},
            num_draining=len(simulation.engines) - len(simulation.live),
        )
        decisions, self._memory = decide(self._settings, {POOL: figures}, self._memory, now_s)
        for _ in range(decisions[POOL].start):
            simulation.start_engine(self._cold_s)
        _drain(simulation, decisions[POOL].stop)
        simulation.figures.sizes.append((now_s, len(simulation.live), in_flight))


class Keda:
    """KEDA's scaler and the autoscaler of Kubernetes, with their default times."""

    period_s = 30.0

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._wants: deque[tuple[float, int]] = deque()

    def look(self, simulation: Simulation) -> None:
        now_s, in_flight = simulation.now_s, simulation.num_in_flight()
        want = min(self._settings.max, math.ceil(in_flight / self._settings.per_engine))
        self._wants.append((now_s, want))
        while self._wants[0][0] < now_s - WINDOW_S:
            self._wants.popleft()
        for _ in range(want - len(simulation.live) - len(simulation.starting)):
            simulation.start_engine(COLD_S)
        _drain(simulation, len(simulation.live) - max(want for _, want in self._wants))
        simulation.figures.sizes.append((now_s, len(simulation.live), in_flight))


def _drain(simulation: Simulation, count: int) -> None:
    by_name = {str(engine.number): engine for engine in simulation.live}
    loads = [WorkerLoad(name, engine.num_held) for name, engine in by_name.items()]
    for name in choose_victims(loads, count):
        simulation.drain(by_name[name])
