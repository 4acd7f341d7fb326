"""Routers from which engines pull: a shared queue, and a queue for each slot."""

import hashlib
from collections import deque
from collections.abc import Iterator
from itertools import chain

from ops.simulate.engine import Engine, Request
from ops.simulate.simulation import Simulation
from shared.bus.priorities import NUM_PRIORITIES, priority_of
from shared.stage.slots import BEGINNING_TOKENS, owners_of


class SharedQueue:
    """One queue, as the broker keeps it: the pulls of engines are served in turns."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._pulls: dict[Engine, None] = {}

    def route(self, simulation: Simulation, request: Request) -> None:
        self._queue.append(request)
        self._serve(simulation)

    def ask(self, simulation: Simulation, engine: Engine) -> None:
        if engine not in self._pulls and engine.has_room():
            self._pulls[engine] = None
            self._serve(simulation)

    def change(self, simulation: Simulation) -> None:
        """Keep the pulls: draining engines get nothing by theirs."""

    def _serve(self, simulation: Simulation) -> None:
        while self._queue and self._pulls:
            engine = next(iter(self._pulls))
            del self._pulls[engine]
            if not engine.is_draining and engine.has_room():
                simulation.give(engine, self._queue.popleft())
                self.ask(simulation, engine)

    def waiting(self) -> Iterator[Request]:
        return iter(self._queue)


class Slots:
    """A queue for each slot. All engines pull from it by their priorities, as in the product."""

    def __init__(self, num_slots: int) -> None:
        self._queues: list[deque[Request]] = [deque() for _ in range(num_slots)]
        self._owners: list[Engine] = []
        self._turns: dict[Engine, None] = {}
        """Engines in the order of their pulls: the engine with the latest request is the last."""

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

    def waiting(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues)


def slot_of(request: Request, num_slots: int) -> int:
    """Return the slot of a simulated request: a hash of its image or of its first tokens."""
    if 2 * request.num_image_tokens >= request.prompt:
        key = request.chain[-2][0]
    else:
        keys = (key for key, tokens in request.chain if tokens >= BEGINNING_TOKENS)
        key = (*next(keys, request.chain[-1][0]), BEGINNING_TOKENS)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return int(digest, 16) % num_slots
