"""Bucket of autoscaling, with the leader's plan, the actuators' reports, and operators' orders."""

from collections.abc import Callable

from shared.bus.bus import Bus
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import (
    PLAN_AGE_S,
    PoolPlan,
    PoolReport,
    ScaleOrders,
    ScalePlan,
    decode_pool_report,
    decode_scale_orders,
    decode_scale_plan,
)
from shared.scaling.pools import pool_name

# Actuators report every second. Without a report, the actuator is away and its workers unknown.
REPORT_AGE_S = 5.0

# Simultaneous changes by operators are rare, and after each conflict one change is stored.
CONFLICTS = 10


async def read_plan(bus: Bus) -> ScalePlan | None:
    """Return the plan, even if its leader has ended."""
    last = await bus.read_last(subjects.SCALE_STREAM, subjects.SCALE_PLAN)
    return None if last is None else decode_scale_plan(last.data)


async def read_current_plan(bus: Bus) -> ScalePlan | None:
    """Return the plan of a living leader."""
    last = await bus.read_last(subjects.SCALE_STREAM, subjects.SCALE_PLAN)
    if last is None or bus.now_ms() - last.stored_ms > 1000 * PLAN_AGE_S:
        return None
    plan = decode_scale_plan(last.data)
    return plan if plan and plan.leader else None


async def read_report(bus: Bus, pool: str, max_age_s: float = REPORT_AGE_S) -> PoolReport | None:
    """Return the report on a pool by a living actuator."""
    last = await bus.read_last(subjects.SCALE_STREAM, subjects.scale_report(pool))
    if last is None or bus.now_ms() - last.stored_ms > 1000 * max_age_s:
        return None
    return decode_pool_report(last.data)


async def write_report(bus: Bus, report: PoolReport) -> None:
    await bus.publish_without_id(subjects.scale_report(report.pool), to_json(report))


async def read_orders(bus: Bus) -> ScaleOrders:
    last = await bus.read_last(subjects.SCALE_STREAM, subjects.SCALE_ORDERS)
    return ScaleOrders() if last is None else decode_scale_orders(last.data) or ScaleOrders()


async def change_orders(bus: Bus, change: Callable[[ScaleOrders], ScaleOrders]) -> ScaleOrders:
    """Replace the orders by `change(orders)`. Raises Fenced after many conflicts."""
    for _ in range(CONFLICTS):
        last = await bus.read_last(subjects.SCALE_STREAM, subjects.SCALE_ORDERS)
        before = None if last is None else decode_scale_orders(last.data)
        orders = change(before or ScaleOrders())
        try:
            sequence = 0 if last is None else last.sequence
            await bus.append(subjects.SCALE_ORDERS, to_json(orders), sequence)
        except Fenced:
            continue
        return orders
    raise Fenced("other operators change the orders at the same time; try again")


async def find_pool(bus: Bus, stage: str, model: str) -> tuple[str, PoolPlan] | None:
    """Return name and plan of the pool that serves a stage; None if it is not scaled.

    If it has several pools, the pool with the most workers is returned.
    """
    plan = await read_current_plan(bus)
    names = (pool_name(stage, model), pool_name(stage, None))
    pools = {
        name: pool
        for name, pool in (plan.pools.items() if plan else ())
        if name in names or (name.startswith(f"{stage}.") and name.endswith(f"/{model}"))
    }
    return max(pools.items(), key=lambda item: item[1].running, default=None)
