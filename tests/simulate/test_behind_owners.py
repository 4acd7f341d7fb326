"""The simulated form of slots as engines pull from them."""

from ops.simulate.behind_owners import SlotsBehindOwners, run
from ops.simulate.report import SLOTS_PER_ENGINE, run_router
from ops.simulate.simulation import quantile


def test_all_engines_behind_the_owner_leave_no_tail() -> None:
    load, engines, num_requests = "bursty chat", 16, 3000
    figures = run(SlotsBehindOwners(SLOTS_PER_ENGINE * engines), load, engines, num_requests, 1)
    found = [quantile(figures.ttft_s, part) for part in (0.5, 0.99)]
    assert (*found, round(figures.hit_rate, 3), figures.num_stolen) == (0.031, 0.215, 0.576, 138)
    others = run_router("slots, thieves by backlog", load, engines, num_requests, 1)
    assert found[1] < quantile(others.ttft_s, 0.99) / 2
