"""Slots as engines pull from them: each engine stands at every slot, behind the slot's owner.

`python -m ops.simulate.behind_owners` compares this with a shared queue, and with thieves that
choose two slots by their backlog, under the loads of the report.
"""

import sys

from ops.simulate.engine import Engine
from ops.simulate.loads import LOADS
from ops.simulate.report import SLOTS_PER_ENGINE
from ops.simulate.routers import SharedQueue, Slots
from ops.simulate.simulation import Figures, Router, Simulation, quantile

NUM_ENGINES = 16
NUM_REQUESTS = 20_000
SEED = 1


class SlotsBehindOwners(Slots):
    """A queue for each slot, from which all engines pull: an idle owner first."""

    def tick(self, simulation: Simulation) -> None:
        every = [*range(len(self._queues))]
        live: list[Engine] = [*simulation.live]
        self._stealing = {engine.number: every for engine in live}
        self._thieves = dict.fromkeys(every, live)
        for slot, queue in enumerate(self._queues):
            if queue:
                self._serve(simulation, slot)


def run(router: Router, load: str, num_engines: int, num_requests: int, seed: int) -> Figures:
    make, rate = LOADS[load]
    requests = make(num_requests, rate * num_engines, seed)
    return Simulation(requests, router, num_engines, seed).run()


def main() -> None:
    num_slots = SLOTS_PER_ENGINE * NUM_ENGINES
    for load in LOADS:
        sys.stdout.write(f"{load}\n")
        for name, router in (
            ("shared queue", SharedQueue()),
            ("thieves by backlog", Slots(num_slots, by_backlog=True)),
            ("all behind owners", SlotsBehindOwners(num_slots)),
        ):
            figures = run(router, load, NUM_ENGINES, NUM_REQUESTS, SEED)
            p50, p99 = (quantile(figures.ttft_s, part) for part in (0.5, 0.99))
            answer = quantile(figures.answer_s, 0.99)
            cells = f"{p50:.3f} | {p99:.3f} | {answer:.3f} | {figures.hit_rate:.1%}"
            sys.stdout.write(f"| {name} | {cells} | {figures.num_stolen / NUM_REQUESTS:.1%} |\n")


if __name__ == "__main__":
    main()
