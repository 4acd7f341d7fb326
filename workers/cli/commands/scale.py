"""The command `pagemill scale`: look at the pools, set their sizes, pause the autoscaler."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from shared.errors import ConfigError, Unavailable
from shared.protocol.messages import PoolPlan, ScaleOrders, ScalePlan
from shared.scaling.budget import with_schedule, with_sizes
from shared.state import scale_state
from workers import settings
from workers.cli.audited import audited
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, Json, NatsUrl, load
from workers.cli.terminal import print_json, print_line, print_note
from workers.pools import Pools, pools_of
from workers.roles import role_of

AUTO = "auto"
HEADER = (
    f"{'pool':<24} {'state':<18} {'wanted':>6} {'set':>4} {'running':>7} {'starting':>8}"
    f" {'draining':>8} {'pending':>7} {'in flight':>9}"
)


class _PoolRow(Struct):
    pool: str
    state: str
    set: int | None
    """Size set by an operator."""
    holds: int | None
    """Size in effect, within the pool's max and the budget."""
    refused: str | None
    """Reason for which no worker of the pool can start."""
    plan: PoolPlan


async def scale(
    *sizes: str,
    pause: bool = False,
    resume: bool = False,
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Show the pools of workers, or set their sizes.

    The broker stores each size. It applies until POOL=auto releases the pool.

    Parameters
    ----------
    sizes
        POOL=N keeps a pool at N workers; POOL=auto lets the autoscaler choose the size again.
    pause
        Keep all pools at their present sizes until --resume.
    resume
        Let the autoscaler change sizes again, after --pause.
    """
    loaded = load(config)
    pools = pools_of(loaded)
    if pause and resume:
        raise ConfigError("--pause and --resume exclude each other", field="pause")
    changes = dict(_parse(size, pools) for size in sizes)
    async with connected(settings.login_of(loaded, given_url=nats), "scale") as bus:
        if changes or pause or resume:
            paused = True if pause else False if resume else None
            target = " ".join([*sizes, *["pause"] * pause, *["resume"] * resume])
            async with audited(bus, "scale", target):
                await scale_state.change_orders(
                    bus, lambda orders: _changed(orders, changes, paused)
                )
        orders = await scale_state.read_orders(bus)
        plan = await scale_state.read_current_plan(bus)
        now = datetime.fromtimestamp(bus.now_ms() / 1000, pools.timezone)
        refused = {
            (report.stage, report.model): report.refused
            for report in await bus.heartbeats.read_refusals()
            if not report.pid
        }
    if plan is None:
        raise Unavailable("no autoscaler leads: is one running, and are there scale.pools?")
    rows = _rows(plan, orders, pools, now, refused)
    if json:
        for row in rows:
            print_json(row)
        return 0
    _show(rows, pools)
    print_note(f"leader {plan.leader}" + "; paused" * orders.paused)
    return 0


def _parse(size: str, pools: Pools) -> tuple[str, int | None]:
    """Return a pool and its size, which is None for POOL=auto. Raises ConfigError."""
    name, _, count = size.rpartition("=")
    if not name or not (count == AUTO or count.isdecimal()):
        raise ConfigError(f"{size!r} is neither POOL=N nor POOL={AUTO}", field="sizes")
    pool = pools.resolve(name)
    if count == AUTO:
        return pool.name, None
    least, most = role_of(pool.spec.role).min_workers, pool.settings.max
    if not least <= int(count) <= most:
        raise ConfigError(
            f"{size}: a pool {pool.name} has {least} to {most} workers, see its max in scale.pools",
            field="sizes",
        )
    return pool.name, int(count)


def _changed(
    orders: ScaleOrders, changes: Mapping[str, int | None], paused: bool | None
) -> ScaleOrders:
    merged = {**orders.workers, **changes}
    workers = {name: count for name, count in merged.items() if count is not None}
    return replace(orders, workers=workers, paused=orders.paused if paused is None else paused)


def _rows(
    plan: ScalePlan,
    orders: ScaleOrders,
    pools: Pools,
    now: datetime,
    refused: Mapping[tuple[str, str], str],
) -> list[_PoolRow]:
    """`refused` has the reasons for which the workers of a stage and a model do not start."""
    starts_s = {name: pool.learned.cold_start_s for name, pool in plan.pools.items()}
    scaling = with_schedule(pools.scaling, now, starts_s)
    limited = with_sizes(scaling, orders.workers).pools
    held = {n: limited[n].max if n in limited else size for n, size in orders.workers.items()}
    reasons = {
        name: next(
            (refused[pool.stage, m] for m in pool.models if (pool.stage, m) in refused), None
        )
        for name, pool in pools.by_name.items()
    }
    return [
        _PoolRow(
            name, pool.state, orders.workers.get(name), held.get(name), reasons.get(name), pool
        )
        for name, pool in plan.pools.items()
    ]


def _show(rows: Sequence[_PoolRow], pools: Pools) -> None:
    print_line(HEADER)
    for row in rows:
        pool, is_set = row.plan, "-" if row.holds is None else str(row.holds)
        print_line(
            f"{row.pool:<24} {row.state:<18} {pool.wanted:>6} {is_set:>4}"
            f" {pool.running:>7} {pool.starting:>8} {pool.draining:>8}"
            f" {pool.pending:>7} {pool.in_flight:>9}"
        )
        print_line(f"  {pool.why}")
        if row.refused is not None:
            print_line(f"  no worker starts: {row.refused}")
    for row in rows:
        if row.holds != row.set:
            limit = pools.by_name[row.pool].settings.max
            reason = f"its max is {limit}" if row.holds == limit else "the budget leaves no more"
            print_note(f"{row.pool} is set to {row.set}, and gets {row.holds}: {reason}")
