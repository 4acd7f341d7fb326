"""Routers that know nothing of caches: in turns, a shared queue, slots."""

import hashlib
from collections import deque

from ops.simulate.engine import Engine, Key, Request
from ops.simulate.simulation import Simulation
from shared.bus.priorities import NUM_PRIORITIES, priority_of
from shared.stage.slots import BEGINNING_TOKENS, owners_of


class Push:
    """Base of the routers that choose an engine at once; keeps no request, needs no event."""

    needs_news = False
    tick_s = 0.0

    def ask(self, simulation: Simulation, engine: Engine) -> None:
        pass

    def idle(self, simulation: Simulation, engine: Engine) -> None:
        pass

    def tick(self, simulation: Simulation) -> None:
        pass

    def hear(self, at_s: float, key: Key, engine: Engine, is_stored: bool) -> None:
        pass

    def change(self, simulation: Simulation) -> None:
        pass

    def num_waiting(self) -> int:
        return 0

    def oldest_s(self) -> float | None:
        return None


class RoundRobin(Push):
    """Engines get requests in turns, whatever they hold."""

    def __init__(self) -> None:
        self._turn = 0

    def route(self, simulation: Simulation, request: Request) -> None:
        self._turn += 1
        simulation.give(simulation.live[self._turn % len(simulation.live)], request)


class SharedQueue(Push):
    """One queue, as the broker keeps it: the pulls of engines are served in turns or by load."""

    def __init__(self, by_load: bool = False) -> None:
        self._by_load = by_load
        self._queue: deque[Request] = deque()
        self._pulls: list[deque[Engine]] = [deque() for _ in range(NUM_PRIORITIES)]
        self._asking: set[int] = set()

    def route(self, simulation: Simulation, request: Request) -> None:
        self._queue.append(request)
        self._serve(simulation)

    def ask(self, simulation: Simulation, engine: Engine) -> None:
        if engine.number not in self._asking and engine.has_room():
            level = (
                min(NUM_PRIORITIES - 1, int(NUM_PRIORITIES * engine.load)) if self._by_load else 0
            )
            self._asking.add(engine.number)
            self._pulls[level].append(engine)
            self._serve(simulation)

    def _serve(self, simulation: Simulation) -> None:
        while self._queue:
            pulls = next((pulls for pulls in self._pulls if pulls), None)
            if pulls is None:
                return
            engine = pulls.popleft()
            self._asking.discard(engine.number)
            if not engine.is_draining and engine.has_room():
                simulation.give(engine, self._queue.popleft())
                self.ask(simulation, engine)

    def num_waiting(self) -> int:
        return len(self._queue)

    def oldest_s(self) -> float | None:
        return self._queue[0].arrived_s if self._queue else None


class Slots(Push):
    """A queue for each slot, from which all engines pull by their priorities, as in the product."""

    def __init__(self, num_slots: int) -> None:
        self._queues: list[deque[Request]] = [deque() for _ in range(num_slots)]
        self._owners: list[Engine] = []
        self._turns: dict[Engine, None] = {}
        """Engines in the order of their pulls, that is of what they were given last."""

    def route(self, simulation: Simulation, request: Request) -> None:
        slot = slot_of(request, len(self._queues))
        self._queues[slot].append(request)
        self._serve(simulation, slot)

    def ask(self, simulation: Simulation, engine: Engine) -> None:
        for slot, queue in enumerate(self._queues):
            if queue:
                self._serve(simulation, slot)

    def change(self, simulation: Simulation) -> None:
        self._turns = dict.fromkeys(simulation.live)
        by_name = {str(engine.number): engine for engine in simulation.live}
        slots = range(len(self._queues)) if by_name else ()
        self._owners = [by_name[name] for name in owners_of(slots, by_name).values()]

    def _serve(self, simulation: Simulation, slot: int) -> None:
        """Give what waits in a slot to the pull that is served first."""
        queue = self._queues[slot]
        while queue and self._owners:
            owner = self._owners[slot]
            best, least = None, NUM_PRIORITIES
            for engine in (owner, *self._turns):
                if engine.has_room() and not engine.is_draining:
                    priority = priority_of(engine.pull_load, is_owner=engine is owner)
                    if priority < least:
                        best, least = engine, priority
                    if least == 0:
                        break
            if best is None:
                return
            del self._turns[best]
            self._turns[best] = None
            simulation.figures.num_stolen += best is not owner
            simulation.give(best, queue.popleft())

    def num_waiting(self) -> int:
        return sum(map(len, self._queues))

    def oldest_s(self) -> float | None:
        return min((queue[0].arrived_s for queue in self._queues if queue), default=None)


def slot_of(request: Request, num_slots: int, num_tokens: int = BEGINNING_TOKENS) -> int:
    """Return the slot of a simulated request, of which the first `num_tokens` decide on it."""
    if 2 * request.num_image_tokens >= request.prompt:
        key = request.chain[-2][0]
    else:
        keys = (key for key, tokens in request.chain if tokens >= num_tokens)
        key = (*next(keys, request.chain[-1][0]), num_tokens)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return int(digest, 16) % num_slots
