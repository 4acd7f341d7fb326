"""Plans that an autoscaler publishes for the actuator."""

from shared.scaling.memory import Memory
from shared.scaling.policy import decide
from shared.scaling.pools import (
    PoolDecision,
    PoolFigures,
    PoolSettings,
    ScalingSettings,
    WorkerLoad,
)
from tests.autoscaler.conftest import ENGINE
from workers.actuator import choose_changes
from workers.autoscaler.presence import Workers
from workers.autoscaler.worker import plan_of

SEEN = PoolFigures(0, 0, 0.0, 3)


def test_victims_are_the_least_loaded_without_payloads() -> None:
    ready = (WorkerLoad("1", 0, 2), WorkerLoad("2", 5), WorkerLoad("3", 1))
    plan = plan_of(PoolDecision(2, (), "idle"), SEEN, Workers(ready, {"4": 1.0}), "a")
    assert (plan.wanted, plan.drain) == (2, [3, 4])


def test_a_start_that_is_given_up_is_no_victim_and_no_start() -> None:
    workers = Workers(starting={"4": 301.0, "5": 1.0})
    plan = plan_of(PoolDecision(1, ("4",), "demand"), SEEN, workers, "a")
    assert (plan.give_up, plan.drain, plan.starting, plan.starting_s) == ([4], [], 1, 1.0)


def test_a_start_that_is_given_up_is_replaced_after_the_pause_also_in_a_pool_with_a_min() -> None:
    """An actuator starts a worker for each that it lacks, so the plan must not ask for one."""
    scaling = ScalingSettings({ENGINE: PoolSettings(min=2, max=4, start_timeout_s=300.0)})
    memory: Memory = {}
    plans = []
    for now_s, running, starting in (
        (1000.0, 1, {"5": 301.0}),
        (1001.0, 1, {}),
        (1059.0, 1, {}),
        (1060.0, 1, {}),
        (1061.0, 1, {"6": 1.0}),
    ):
        figures = PoolFigures(0, 0, 0.0, running, starting)
        decisions, memory = decide(scaling, {ENGINE: figures}, memory, now_s)
        plans.append(plan_of(decisions[ENGINE], figures, Workers(starting=starting), "a"))
    assert [plan.wanted for plan in plans] == [1, 1, 1, 2, 2]
    assert [plan.give_up for plan in plans] == [[5], [], [], [], []]
    assert [plan.reason for plan in plans] == [*["given_up"] * 3, "min", "min"]
    # Changes by a supervisor for this plan, and then for the last two plans.
    assert choose_changes([4, 5], plans[0].wanted, plans[0].drain, plans[0].give_up) == ([5], 0)
    assert choose_changes([4], plans[3].wanted, [], []) == ([], 1)
