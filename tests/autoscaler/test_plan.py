"""What an autoscaler tells the actuator, and what an operator's orders change."""

from shared.protocol.messages import ScaleOrders
from shared.scaling.pools import (
    PoolDecision,
    PoolFigures,
    PoolSettings,
    ScalingSettings,
    WorkerLoad,
)
from workers.autoscaler.presence import Workers
from workers.autoscaler.worker import plan_of, with_orders

SEEN = PoolFigures(0, 0, 0.0, 3)


def test_victims_are_the_least_loaded_without_payloads() -> None:
    ready = (WorkerLoad("1", 0, 2), WorkerLoad("2", 5), WorkerLoad("3", 1))
    plan = plan_of(PoolDecision(1, 0, 2, (), "idle"), SEEN, Workers(ready, {"4": 1.0}))
    assert (plan.wanted, plan.drain) == (1, [3, 4])


def test_workers_that_others_have_started_are_not_asked_for() -> None:
    workers = Workers((WorkerLoad("1"),), others=(WorkerLoad("engine-9"),))
    assert plan_of(PoolDecision(3, 1, 0, (), "demand"), SEEN, workers).wanted == 2
    assert plan_of(PoolDecision(0, 0, 2, (), "demand"), SEEN, workers).wanted == 0


def test_a_start_that_is_given_up_is_no_victim_and_no_start() -> None:
    workers = Workers(starting={"4": 301.0, "5": 1.0})
    plan = plan_of(PoolDecision(1, 0, 0, ("4",), "demand"), SEEN, workers)
    assert (plan.give_up, plan.drain, plan.starting, plan.starting_s) == ([4], [], 1, 1.0)


def test_an_order_is_the_size_of_its_pool_and_counts_for_more_than_the_budget() -> None:
    pools = {"engine": PoolSettings(max=4), "encoder": PoolSettings(max=4)}
    settings = ScalingSettings(pools, (("encoder", "engine"),), budget=2)
    ordered = with_orders(settings, ScaleOrders({"engine": 3, "gone": 1}))
    assert (ordered.pools["engine"].min, ordered.pools["engine"].max) == (3, 3)
    assert ordered.pools["encoder"] == pools["encoder"]
    assert ordered.budget == 3
