"""The event loop: arrivals, steps of engines, looks of the autoscaler."""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from ops.simulate.engine import Cost, Engine, Request


@dataclass(slots=True)
class Figures:
    """Figures of a run. Times are of requests that arrived after `counted_from_s`."""

    ttft_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    num_ended: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_stolen: int = 0
    num_started: int = 0
    engine_s: float = 0.0
    served_s: float = 0.0
    """Sum of the times that requests have spent in engines."""
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, ready engines and requests in flight, at each look of the autoscaler."""

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)


def quantile(values: list[float], part: float) -> float:
    """Return a quantile of `values`, to a millisecond; 0 of none."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3) if ordered else 0.0


class Router(Protocol):
    """Decides which engine serves a request."""

    def route(self, simulation: "Simulation", request: Request) -> None:
        """Give the request to an engine, or keep it until one asks."""

    def ask(self, simulation: "Simulation", engine: Engine) -> None:
        """Give a waiting request to an engine that may have room."""

    def change(self, simulation: "Simulation") -> None:
        """Follow a change of the engines."""

    def waiting(self) -> Iterator[Request]:
        """Return the requests that wait for any engine."""


class Scaler(Protocol):
    """Decides how many engines there are."""

    period_s: float

    def look(self, simulation: "Simulation") -> None:
        """Start and drain engines."""


Event = tuple[float, int, Engine | None, int]
START, LOOK = -1, -2
"""In place of the version of an engine's plan."""


class Simulation:
    """One run. Routers and scalers see its engines, and act through its methods."""

    def __init__(
        self,
        requests: list[Request],
        router: Router,
        num_engines: int,
        scaler: Scaler | None = None,
        cost: Cost | None = None,
    ) -> None:
        self.requests, self.router, self.scaler = requests, router, scaler
        self.cost = cost or Cost()
        self.now_s = 0.0
        self.figures = Figures()
        self.engines: list[Engine] = []
        """Ready engines, those that drain included."""
        self.live: list[Engine] = []
        """Ready engines that take requests."""
        self.starting: dict[Engine, float] = {}
        """Engines that are not ready, and when they were asked for."""
        self.held: deque[Request] = deque()
        """Requests for a pool without engines."""
        # The first fifth warms the caches.
        self.counted_from_s = 0.0 if scaler else requests[len(requests) // 5].arrived_s
        self.max_todo = 2.0 * self.cost.step_tokens
        self.num_arrived = self.num_arrived_tokens = 0
        self._events: list[Event] = []
        self._order = self._num_made = 0
        for _ in range(0 if scaler else num_engines):
            self._join(self._new_engine())

    def run(self) -> Figures:
        index, num_requests, events = 0, len(self.requests), self._events
        if self.scaler:
            self._push(0.0, None, LOOK)
        while self.figures.num_ended < num_requests or (self.scaler and self.engines):
            if index < num_requests and (
                not events or self.requests[index].arrived_s <= events[0][0]
            ):
                self.now_s = self.requests[index].arrived_s
                self.arrive(self.requests[index])
                index += 1
                continue
            self.now_s, _, engine, kind = heapq.heappop(events)
            if engine is None:
                self._look()
            elif kind == START:
                self._join(engine)
            elif kind == engine.version:
                self._settle(engine)
        self.figures.engine_s += sum(self.now_s - engine.since_s for engine in self.engines)
        return self.figures

    # -- for routers ----------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        self.num_arrived += 1
        self.num_arrived_tokens += request.prompt
        self.submit(request)

    def submit(self, request: Request) -> None:
        if self.live:
            self.router.route(self, request)
        else:
            self.held.append(request)

    def give(self, engine: Engine, request: Request) -> None:
        """Put a request into an engine's own queue."""
        request.given_s = self.now_s
        engine.add(request)
        if engine.steps_ahead == 0:
            self._plan(engine)
        elif engine.steps_ahead > 1 and (end_s := engine.cut(self.now_s)) is not None:
            self._wake(engine, end_s)

    # -- for scalers ----------------------------------------------------------------------------

    def start_engine(self, cold_s: float) -> None:
        engine = self._new_engine()
        self.starting[engine] = self.now_s
        self._push(self.now_s + cold_s, engine, START)

    def drain(self, engine: Engine) -> None:
        engine.is_draining = True
        self.live.remove(engine)
        self.router.change(self)
        if not engine.num_held:
            self._leave(engine)

    def num_in_flight(self) -> int:
        return sum(engine.num_held for engine in self.engines) + self._num_queued()

    def waiting(self) -> list[Request]:
        """Return the requests that no engine has begun."""
        in_engines = chain.from_iterable(engine.waiting for engine in self.engines)
        return [*self.held, *self.router.waiting(), *in_engines]

    def num_waiting_tokens(self) -> int:
        """Return the prompt tokens that no engine has computed."""
        waiting = sum(request.prompt for request in self.waiting())
        return waiting + sum(engine.todo for engine in self.engines)

    def _num_queued(self) -> int:
        return len(self.held) + sum(1 for _ in self.router.waiting())

    # -- events ---------------------------------------------------------------------------------

    def _push(self, at_s: float, engine: Engine | None, kind: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, engine, kind))

    def _wake(self, engine: Engine, at_s: float) -> None:
        engine.version += 1
        self._push(at_s, engine, engine.version)

    def _look(self) -> None:
        assert self.scaler
        self.scaler.look(self)
        self._push(self.now_s + self.scaler.period_s, None, LOOK)

    def _new_engine(self) -> Engine:
        self._num_made += 1
        self.figures.num_started += 1
        return Engine(self._num_made, self.now_s, self.cost)

    def _join(self, engine: Engine) -> None:
        self.starting.pop(engine, None)
        self.engines.append(engine)
        self.live.append(engine)
        self.router.change(self)
        held, self.held = self.held, deque()
        for request in held:
            self.submit(request)
        self.router.ask(self, engine)

    def _leave(self, engine: Engine) -> None:
        self.engines.remove(engine)
        self.figures.engine_s += self.now_s - engine.since_s

    def _settle(self, engine: Engine) -> None:
        figures = self.figures
        first, last = engine.settle()
        for request in first:
            if request.arrived_s >= self.counted_from_s:
                figures.ttft_s.append(self.now_s - request.arrived_s)
                figures.num_prompt_tokens += request.prompt
                figures.num_hit_tokens += request.hit
        for request in last:
            figures.num_ended += 1
            figures.served_s += self.now_s - request.given_s
            if request.arrived_s >= self.counted_from_s:
                figures.answer_s.append(self.now_s - request.arrived_s)
        engine.steps_ahead = 1  # what comes now is planned with the rest
        if not engine.is_draining:
            self.router.ask(self, engine)
        self._plan(engine)
        if engine.is_draining and not engine.num_held:
            self._leave(engine)

    def _plan(self, engine: Engine) -> None:
        engine.admit(self.max_todo)
        if (end_s := engine.plan(self.now_s)) is not None:
            self._wake(engine, end_s)
