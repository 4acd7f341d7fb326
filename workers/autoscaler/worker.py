"""Autoscaler: reads queues and workers once a second, and writes the plan with each pool's size.

`shared.scaling` decides. An actuator, such as `pagemill up`, reads the plan and starts and drains
workers. Any number of autoscalers may run: one leads, see `lease`, and the others wait.
"""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime

from msgspec.structs import replace

from shared.errors import ConfigError, PagemillError
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.messages import PoolPlan, ScaleOrders, ScalePlan
from shared.scaling.budget import with_schedule, with_sizes
from shared.scaling.explain import explain
from shared.scaling.memory import Memory, PoolMemory
from shared.scaling.policy import decide
from shared.scaling.pools import PoolDecision, PoolFigures, WorkerLoad, choose_victims
from shared.stage.runtime import Context
from shared.state.scale_state import read_orders
from workers.actuator import follow_plan
from workers.autoscaler.figures import Look, Reader, figures_of
from workers.autoscaler.kubernetes_api import ScaleApi
from workers.autoscaler.kubernetes_pools import KubernetesPools
from workers.autoscaler.lease import LEASE_S, RENEW_S, Lease
from workers.autoscaler.presence import Workers
from workers.autoscaler.work_meter import WorkMeter
from workers.pools import Pools, pools_of

LOOK_S = 1.0


async def main(context: Context) -> None:
    pools = pools_of(context.config)
    if not pools.by_name:
        raise ConfigError("scale.pools: the configuration has no pools", field="scale.pools")
    async with contextlib.AsyncExitStack() as stack:
        if context.config.scale.actuator == "kubernetes":
            await _actuate(context, pools, stack)
        await Autoscaler(context, pools).serve()


async def _actuate(context: Context, pools: Pools, stack: contextlib.AsyncExitStack) -> None:
    """Start the actuator. Raises ConfigError if it is not permitted to read the pools' workers."""
    api = ScaleApi.in_cluster()
    stack.push_async_callback(api.close)
    actuator = KubernetesPools(api, pools, context.bus.heartbeats.read)
    await actuator.check()
    tasks = TaskSet()
    for work in (actuator.serve(), follow_plan(context.bus, actuator)):
        stack.callback(tasks.start(work).cancel)


class Autoscaler:
    def __init__(self, context: Context, pools: Pools) -> None:
        self._context = context
        self._pools = pools
        self._lease = Lease(context.bus, context.worker)
        self._reader = Reader(context.bus, context.worker, pools)
        self._meter = WorkMeter(pools)
        self._memory: Memory | None = None
        """None before the first look as the leader."""
        self._arrivals = Counter[str]()
        self._wakes = asyncio.Event()
        self._listening: dict[str, Callable[[], Awaitable[None]]] = {}
        """Functions that end the watch on a model's requests, by model."""

    async def serve(self) -> None:
        context = self._context
        self._register_metrics()
        context.ready([], lambda: {"leads": float(self._lease.is_held)})
        renewals = asyncio.create_task(self._keep_lead())
        while not context.shutdown.asked.is_set():
            try:
                if self._lease.is_held or await self._begin():
                    await self._decide()
                else:
                    await self._listen(set())
            except PagemillError as error:
                context.log.warning("scale_failed", code=error.code, reason=error.message)
            await self._pause()
        await asyncio.wait({renewals}, timeout=LEASE_S)
        renewals.cancel()
        await self._listen(set())
        if not await self._lease.release():
            context.log.warning("lead_not_released", reason="the broker does not answer")

    async def _keep_lead(self) -> None:
        """Renew the lead until the shutdown, also while the main loop waits for a slow broker."""
        shutdown = self._context.shutdown.asked
        while not shutdown.is_set():
            try:
                async with asyncio.timeout(RENEW_S / 2):
                    await shutdown.wait()
            except TimeoutError:
                with contextlib.suppress(PagemillError):
                    if not await self._lease.renew():
                        self._context.log.warning("lost_the_lead")

    async def _begin(self) -> bool:
        """Take the lead if it is free."""
        if not await self._lease.take():
            return False
        self._memory, self._meter = None, WorkMeter(self._pools)
        self._reader = Reader(self._context.bus, self._context.worker, self._pools)
        self._context.log.info("leads")
        return True

    async def _pause(self) -> None:
        """Wait for the next look, for a request for a pool at zero, or for the end."""
        waits = [asyncio.create_task(self._wakes.wait())]
        waits.append(asyncio.create_task(self._context.shutdown.asked.wait()))
        await asyncio.wait(waits, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._wakes.clear()

    # -- decisions ------------------------------------------------------------------------------

    async def _decide(self) -> None:
        """Read the cluster once and write the plan, which renews the lead."""
        arrivals, self._arrivals = self._arrivals, Counter()
        try:
            look, orders = await self._reader.look(), await read_orders(self._context.bus)
        except PagemillError:
            self._arrivals += arrivals  # Kept for the next plan, which must wake their pools.
            raise
        plan = replace(self._lease.plan, paused=orders.paused)
        if look is None:
            self._arrivals += arrivals
        elif not orders.paused:
            plan = self._plan(look, orders, arrivals)
        if not await self._lease.write(plan):
            self._context.log.warning("lost_the_lead")
        elif look is not None:
            await self._listen(self._models_at_zero(look))

    def _plan(self, look: Look, orders: ScaleOrders, arrivals: Counter[str]) -> ScalePlan:
        now_s = asyncio.get_running_loop().time()
        figures = self._meter.look(figures_of(self._pools, look, arrivals), look.beats, now_s)
        before = self._lease.plan.pools
        memory = restored(self._lease.plan, look) if self._memory is None else self._memory
        now = datetime.fromtimestamp(self._context.bus.now_ms() / 1000, self._pools.timezone)
        starts_s = {name: pool.learned.cold_start_s for name, pool in memory.items()}
        settings = with_sizes(with_schedule(self._pools.scaling, now, starts_s), orders.workers)
        decisions, self._memory = decide(settings, figures, memory, now_s)
        pools = {name: before[name] for name in self._pools.by_name if name in before}
        for name, decision in decisions.items():
            if (pool_figures := figures[name]) is not None:
                workers, learned = look.workers[name], self._memory[name].learned
                plan = plan_of(decision, pool_figures, workers, look.actuators[name])
                why = explain(settings.pools[name], pool_figures, decision, learned)
                pools[name] = replace(plan, why=why, learned=learned)
                self._record_decision(name, before.get(name), pools[name], workers)
        return ScalePlan(self._context.worker, pools)

    def _record_decision(
        self, pool: str, before: PoolPlan | None, now: PoolPlan, workers: Workers
    ) -> None:
        """Log and count a decision that changes the plan, and the starts that have ended."""
        metrics = self._context.metrics
        for cold_start_s in workers.cold_starts_s:
            metrics.histogram("scale_cold_start_seconds", pool=pool).observe(cold_start_s)
            self._context.log.info("started", pool=pool, after_s=round(cold_start_s, 2))
        drained = bool(before and (now.drain, now.give_up) == (before.drain, before.give_up))
        if before and now.wanted == before.wanted and (drained or not (now.drain or now.give_up)):
            return
        metrics.counter("scale_decisions_total", pool=pool, reason=now.reason).add()
        fields = {name: getattr(now, name) for name in now.__struct_fields__}
        self._context.log.info("scale", pool=pool, **fields)

    # -- requests for pools at zero ---------------------------------------------------------------

    def _models_at_zero(self, look: Look) -> set[str]:
        """Return the models with an empty pool, which their next request wakes."""
        empty = [pool for name, pool in self._pools.by_name.items() if _is_empty(look, name)]
        return {model for pool in empty for model in pool.models}

    async def _listen(self, models: set[str]) -> None:
        """Watch the requests for these models, and no others: requests may have megabytes."""
        for model in self._listening.keys() - models:
            await self._listening.pop(model)()
        for model in models - self._listening.keys():
            self._listening[model] = await self._context.bus.watch_subjects(
                subjects.requests_of_model(model), self._count_arrival
            )

    def _count_arrival(self, subject: str) -> None:
        self._arrivals[subjects.model_of_request(subject)] += 1
        self._wakes.set()

    # -- metrics ----------------------------------------------------------------------------------

    def _register_metrics(self) -> None:
        for name in self._pools.by_name:
            for gauge, field in (
                ("scale_wanted", "wanted"),
                ("scale_running", "running"),
                ("scale_starting", "starting"),
            ):
                read = functools.partial(self._planned, name, field)
                self._context.metrics.set_function(gauge, read, pool=name)

    def _planned(self, pool: str, field: str) -> float:
        plan = self._lease.plan.pools.get(pool) if self._lease.is_held else None
        return 0.0 if plan is None else float(getattr(plan, field))


def _is_empty(look: Look, pool: str) -> bool:
    workers = look.workers.get(pool)
    return workers is not None and not (workers.ready or workers.starting or workers.others)


def plan_of(
    decision: PoolDecision, figures: PoolFigures, workers: Workers, actuator: str
) -> PoolPlan:
    """Return the plan for the pool's actuator, without its explanation."""
    starting = {name for name in workers.starting if name not in decision.give_up}
    loads = [*workers.ready, *(WorkerLoad(name, is_ready=False) for name in starting)]
    return PoolPlan(
        wanted=decision.target,
        drain=sorted(map(int, choose_victims(loads, len(loads) - decision.target))),
        give_up=sorted(map(int, decision.give_up)),
        reason=decision.reason,
        running=figures.num_running + figures.num_others,
        starting=len(starting),
        starting_s=max((workers.starting[name] for name in starting), default=0.0),
        draining=figures.num_draining,
        pending=figures.pending,
        in_flight=figures.in_flight,
        oldest_s=figures.oldest_s,
        pinned=figures.num_pinned,
        actuator=actuator,
    )


def restored(plan: ScalePlan, look: Look) -> dict[str, PoolMemory]:
    """Return the memory of a new leader, from the plan of the last one.

    The target is only known if the actuator still follows that plan.
    """
    return {
        name: PoolMemory(
            target=pool.wanted if pool.actuator == look.actuators.get(name) else None,
            learned=pool.learned,
        )
        for name, pool in plan.pools.items()
    }
