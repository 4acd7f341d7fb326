"""Routers that know nothing of caches: in turns, a shared queue, slots."""

import hashlib
from collections import deque
from itertools import chain

from ops.simulate.engine import Engine, Key, Request
from ops.simulate.simulation import Simulation
from shared.stage.slots import beginning_blocks

BLOCK_TOKENS = 16
NUM_LEVELS = 10
"""The broker's priorities of pulls."""
NUM_STOLEN_SLOTS = 2
"""Slots of other owners that an engine pulls from."""


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
        self._pulls: list[deque[Engine]] = [deque() for _ in range(NUM_LEVELS)]
        self._asking: set[int] = set()

    def route(self, simulation: Simulation, request: Request) -> None:
        self._queue.append(request)
        self._serve(simulation)

    def ask(self, simulation: Simulation, engine: Engine) -> None:
        if engine.number not in self._asking and engine.has_room():
            level = min(NUM_LEVELS - 1, int(NUM_LEVELS * engine.load)) if self._by_load else 0
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
    """A queue for each slot. Its owner pulls from it, and two other engines behind the owner.

    Which slot is `shared.stage.slots` in terms of beginnings. Pulls last for `tick_s`; then each
    engine chooses two slots at random, or with `by_backlog` those with the longest queues.
    """

    tick_s = 1.0

    def __init__(self, num_slots: int, by_backlog: bool = False) -> None:
        self._by_backlog = by_backlog
        self._queues: list[deque[Request]] = [deque() for _ in range(num_slots)]
        self._owners: list[Engine] = []
        self._owned: dict[int, list[int]] = {}
        self._thieves: dict[int, list[Engine]] = {}
        self._stealing: dict[int, list[int]] = {}

    def route(self, simulation: Simulation, request: Request) -> None:
        slot = slot_of(request, len(self._queues))
        self._queues[slot].append(request)
        self._serve(simulation, slot)

    def ask(self, simulation: Simulation, engine: Engine) -> None:
        number = engine.number
        for slot in chain(self._owned.get(number, ()), self._stealing.get(number, ())):
            if self._queues[slot]:
                self._serve(simulation, slot)

    def tick(self, simulation: Simulation) -> None:
        self._thieves, self._stealing = {}, {}
        every = range(len(self._queues))
        longest = sorted(every, key=lambda slot: -len(self._queues[slot]))[:NUM_STOLEN_SLOTS]
        for engine in simulation.live:
            slots = simulation.random.sample(every, NUM_STOLEN_SLOTS)
            if self._by_backlog and self._queues[longest[0]]:
                slots = longest
            self._stealing[engine.number] = slots
            for slot in slots:
                self._thieves.setdefault(slot, []).append(engine)
        for slot, queue in enumerate(self._queues):
            if queue:
                self._serve(simulation, slot)

    def change(self, simulation: Simulation) -> None:
        """Each slot goes to the engine with the highest hash of both (rendezvous)."""
        self._owned = {}
        live = simulation.live
        self._owners = [
            max(live, key=lambda e: _mixed(e.number, slot))
            for slot in range(len(self._queues) if live else 0)
        ]
        for slot, owner in enumerate(self._owners):
            self._owned.setdefault(owner.number, []).append(slot)

    def _serve(self, simulation: Simulation, slot: int) -> None:
        """Give what waits in a slot to the pull of the lowest level."""
        queue = self._queues[slot]
        while queue and self._owners:
            owner = self._owners[slot]
            best, least = None, float(NUM_LEVELS)
            for engine in (owner, *self._thieves.get(slot, ())):
                level = int(NUM_LEVELS * engine.load)
                level = level if engine is owner else 5 + level // 2
                if level < least and engine.has_room() and not engine.is_draining:
                    best, least = engine, level
            if best is None:
                return
            simulation.figures.num_stolen += best is not owner
            simulation.give(best, queue.popleft())

    def num_waiting(self) -> int:
        return sum(map(len, self._queues))

    def oldest_s(self) -> float | None:
        return min((queue[0].arrived_s for queue in self._queues if queue), default=None)


def slot_of(request: Request, num_slots: int) -> int:
    """Return the slot of a simulated request: that of the beginning that decides on it."""
    if 2 * request.num_image_tokens >= request.prompt:
        key: tuple[int, ...] = request.chain[-2][0]
    else:
        depth = BLOCK_TOKENS * beginning_blocks(request.prompt // BLOCK_TOKENS)
        key = next(key for key, tokens in request.chain if tokens >= depth)
        key = (*key, depth)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return int(digest, 16) % num_slots


def _mixed(engine: int, slot: int) -> int:
    """Mix two numbers well enough for an even choice (the finalizer of splitmix64)."""
    value = (engine * 0x9E3779B97F4A7C15 + slot * 0xD1B54A32D192ED03) & (2**64 - 1)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ value >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return value ^ value >> 31
