"""Properties of the autoscaling policy."""

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.scaling.memory import IDLE_PRICE, RETRY_S, Learned, Memory, PoolMemory, delay_of
from shared.scaling.policy import decide
from shared.scaling.pools import (
    PoolDecision,
    PoolFigures,
    PoolSettings,
    PromptFigures,
    ScalingSettings,
    WorkerLoad,
    WorkFigures,
    choose_victims,
)

NAMES = ("renderer", "encoder", "engine")
EDGES = (("renderer", "encoder"), ("renderer", "engine"))
QUIET = PoolFigures(0, 0, 0.0, 0)


@st.composite
def pool_settings(draw: st.DrawFn) -> PoolSettings:
    least = draw(st.integers(0, 4))
    return PoolSettings(
        min=least,
        max=least + draw(st.integers(1, 12)),
        per_engine=draw(st.integers(1, 20)),
        idle_s=draw(st.sampled_from([0.0, 10.0, 60.0])),
        priority=draw(st.integers(0, 2)),
    )


@st.composite
def scaling_settings(draw: st.DrawFn) -> ScalingSettings:
    pools = {name: draw(pool_settings()) for name in NAMES}
    least = sum(pool.min for pool in pools.values())
    budget = draw(st.none() | st.integers(least, least + 20))
    return ScalingSettings(pools, EDGES, budget)


STARTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1000), max_size=6)
FIGURES = st.builds(
    PoolFigures,
    st.integers(0, 300),
    st.integers(0, 300),
    st.floats(0, 100),
    st.integers(0, 20),
    STARTS,
    st.integers(0, 20),
    st.integers(0, 5),
    st.integers(0, 3),
    work=st.none()
    | st.builds(
        WorkFigures,
        st.floats(0, 1e4),
        st.floats(0.01, 1e3),
        st.integers(0, 100),
        st.none()
        | st.builds(PromptFigures, st.floats(0, 1e6), st.floats(0, 1e5), st.floats(1, 1e5)),
    ),
)
LOOKS = st.lists(
    st.tuples(st.floats(0.1, 100), st.fixed_dictionaries({n: st.none() | FIGURES for n in NAMES})),
    min_size=1,
    max_size=12,
)


@given(scaling_settings(), LOOKS)
def test_limits_hold_for_all_figures(
    scaling: ScalingSettings, looks: list[tuple[float, dict[str, PoolFigures | None]]]
) -> None:
    memory: Memory = {}
    now_s, before = 0.0, dict[str, int]()
    for passed_s, figures in looks:
        now_s += passed_s
        decisions, memory = decide(scaling, figures, memory, now_s)
        for name, decision in decisions.items():
            pool = scaling.pools[name]
            least = 0 if decision.reason in ("given_up", "no_figures") else pool.min
            assert least <= decision.target <= pool.max
            if figures[name] is None:
                assert (decision.target, decision.reason) == (before[name], "no_figures")
        if scaling.budget is not None:
            assert sum(d.target for d in decisions.values()) <= scaling.budget
        assert {n for n in NAMES if figures[n] is not None} <= decisions.keys()
        before = {name: decision.target for name, decision in decisions.items()}


@given(scaling_settings(), LOOKS)
def test_growth_never_leads_beyond_the_budget_but_for_a_min(
    scaling: ScalingSettings, looks: list[tuple[float, dict[str, PoolFigures | None]]]
) -> None:
    memory: Memory = {}
    now_s, before = 0.0, dict[str, int]()
    for passed_s, figures in looks:
        now_s += passed_s
        decisions, memory = decide(scaling, figures, memory, now_s)
        reports = {name: report for name, report in figures.items() if report is not None}
        if scaling.budget is not None and len(reports) == len(NAMES):
            # Planned workers that are not reported yet use the budget, too.
            seen = {n: r.num_running + len(r.starting) for n, r in reports.items()}
            used = sum(max(seen[n] + r.num_draining, before.get(n, 0)) for n, r in reports.items())
            growth = {
                name: max(0, decision.target - max(seen[name], before.get(name, 0)))
                for name, decision in decisions.items()
                if decision.target > scaling.pools[name].min
            }
            assert sum(growth.values()) <= max(0, scaling.budget - used)
        before = {name: decision.target for name, decision in decisions.items()}


class Pool:
    """An actuator of one pool: it follows decisions, after a cold start."""

    def __init__(self, settings: PoolSettings, cold_s: float, num_running: int = 0) -> None:
        self.settings = ScalingSettings({"engine": settings})
        self.cold_s, self.num_running = cold_s, num_running
        self.starting: dict[str, float] = {}
        self.memory: Memory = {}
        self.now_s = 0.0
        self.num_asked = 0
        self.num_started = 0
        self.decision = PoolDecision(0, (), "demand")

    def look(
        self, pending: int, in_flight: int = 0, oldest_s: float = 0.0, step_s: float = 2.0
    ) -> int:
        self.now_s += step_s
        ready = [n for n, at_s in self.starting.items() if self.now_s - at_s >= self.cold_s]
        for name in ready:
            del self.starting[name]
        self.num_running += len(ready)
        ages = {name: self.now_s - at_s for name, at_s in self.starting.items()}
        report = PoolFigures(
            pending,
            in_flight,
            oldest_s,
            self.num_running,
            ages,
            cold_starts_s=(self.cold_s,) * len(ready),
        )
        decisions, self.memory = decide(self.settings, {"engine": report}, self.memory, self.now_s)
        self.decision = decision = decisions["engine"]
        for name in decision.give_up:
            del self.starting[name]
        self.num_started = max(0, decision.target - self.num_running - len(self.starting))
        for _ in range(self.num_started):
            self.num_asked += 1
            self.starting[f"w{self.num_asked}"] = self.now_s
        while self.num_running + len(self.starting) > decision.target:
            if self.starting:
                self.starting.popitem()
            else:
                self.num_running -= 1
        return decision.target


@given(
    pool_settings(),
    st.lists(st.tuples(st.integers(0, 300), st.floats(0, 10)), max_size=10),
    st.integers(0, 20),
)
def test_zero_demand_leads_to_min_within_idle_s(
    settings: PoolSettings, before: list[tuple[int, float]], num_running: int
) -> None:
    pool = Pool(settings, cold_s=5.0, num_running=num_running)
    for pending, oldest_s in before:
        pool.look(pending, oldest_s=oldest_s)
    longest_s = delay_of(settings, Learned(5.0)).longest_s
    for _ in range(int(longest_s / 2) + 1):
        pool.look(0)
    assert pool.decision.target == settings.min


@given(pool_settings(), st.integers(0, 300), st.integers(0, 100), st.floats(0, 2))
def test_constant_figures_lead_to_one_size(
    settings: PoolSettings, pending: int, in_flight: int, oldest_s: float
) -> None:
    pool = Pool(settings, cold_s=5.0)
    sizes = [pool.look(pending, in_flight, oldest_s) for _ in range(100)]
    assert len(set(sizes[1:])) == 1


@given(st.integers(1, 40), st.floats(2, 30), st.integers(1, 64), st.sampled_from([10.0, 60.0]))
def test_a_constant_load_makes_the_pool_swing_rarely(
    load: int, answer_s: float, per_engine: int, idle_s: float
) -> None:
    """Each worker answers 8 requests at a time; the policy's `per_engine` may be far from that."""
    pool = Pool(PoolSettings(max=64, per_engine=per_engine, idle_s=idle_s), cold_s=6.0)
    rate, waiting, turns, sizes = load / answer_s, 0.0, 0, [0, 0]
    for look in range(1200):
        waiting += 2 * (rate - min(8 * pool.num_running, waiting) / answer_s)
        behind = max(0.0, waiting - 8 * pool.num_running)
        oldest_s = behind / rate if behind >= 1 else 0.0
        size = pool.look(round(behind), round(waiting - behind), oldest_s)
        if size != sizes[1]:
            turns += look >= 600 and (size < sizes[1]) and sizes[1] > sizes[0]
            sizes = [sizes[1], size]
    assert turns <= 1 + 1200 / (IDLE_PRICE * idle_s)


class World(NamedTuple):
    """Tasks and workers of others in each second, and the delay of reports."""

    seconds: list[tuple[int, int]]
    delay_s: int


@given(
    pool_settings(),
    st.builds(
        World,
        st.lists(st.tuples(st.sampled_from([0, 0, 1, 9, 40]), st.integers(0, 3)), max_size=150),
        st.integers(0, 3),
    ),
)
def test_no_pool_shrinks_within_idle_s_after_it_has_grown(
    settings: PoolSettings, world: World
) -> None:
    """Whatever workers of others do, and however late reports are."""
    scaling = ScalingSettings({"engine": settings})
    reports, grown_s, last = [(0, 0)], -math.inf, 0
    memory: Memory = {"engine": PoolMemory(target=0)}
    for now_s, (num_tasks, num_others) in enumerate(world.seconds):
        reports.append((last, num_others))
        seen, seen_others = reports[max(0, len(reports) - 1 - world.delay_s)]
        report = PoolFigures(num_tasks, 0, 0.0, seen, num_others=seen_others)
        decisions, memory = decide(scaling, {"engine": report}, memory, float(now_s))
        target = decisions["engine"].target
        if target < last:
            assert now_s - grown_s >= (settings.idle_s or 0.0)
        if target > last:
            grown_s = now_s
        last = target


def bursts(pool: Pool, silence_s: int, num: int = 12) -> list[int]:
    """Let bursts come after each silence, and return the number of starts at each of them."""
    starts = []
    for _ in range(num):
        before = pool.num_asked
        for _ in range(20):
            pool.look(40, step_s=1.0)
        starts.append(pool.num_asked - before)
        for _ in range(silence_s):
            pool.look(0, step_s=1.0)
    return starts


@pytest.mark.parametrize(("cold_s", "silence_s"), [(5.0, 70), (5.0, 150), (60.0, 400)])
def test_a_pool_holds_longer_after_silences_that_were_a_little_too_long(
    cold_s: float, silence_s: int
) -> None:
    starts = bursts(Pool(PoolSettings(max=3), cold_s), silence_s)
    assert starts[:2] == [3, 3]
    assert set(starts[2:]) == {0}


def test_a_pool_does_not_hold_for_silences_that_cost_more_than_a_start() -> None:
    pool = Pool(PoolSettings(max=3), cold_s=5.0)
    assert set(bursts(pool, silence_s=200)) == {3}
    assert pool.decision.delay_s == 60.0


def test_a_pool_forgets_short_silences_when_all_are_long() -> None:
    pool = Pool(PoolSettings(max=3), cold_s=5.0)
    bursts(pool, silence_s=100)
    assert pool.decision.delay_s > 100
    bursts(pool, silence_s=900)
    assert pool.decision.delay_s == 60.0


def test_the_default_delay_is_three_measured_starts() -> None:
    assert delay_of(PoolSettings(), Learned()).for_s == 60.0
    assert delay_of(PoolSettings(), Learned(45.0)).for_s == 135.0
    assert delay_of(PoolSettings(idle_s=10.0), Learned(45.0)).for_s == 10.0


def test_workers_of_others_reduce_the_need() -> None:
    scaling = ScalingSettings({"engine": PoolSettings(min=1, max=4, per_engine=1)})
    for num_tasks, num_others, target in ((3, 2, 1), (0, 1, 0), (9, 1, 3)):
        report = PoolFigures(num_tasks, 0, 0.0, 0, num_others=num_others)
        decisions, _ = decide(scaling, {"engine": report}, {}, 0.0)
        assert decisions["engine"].target == target


def size_for(pending: int, in_flight: int, work: WorkFigures, cold_s: float = 10.0) -> int:
    """Return the size of a pool of one worker with 4 places, for this work."""
    scaling = ScalingSettings({"engine": PoolSettings(max=20, per_engine=4, ttft_target_s=2.0)})
    memory = {"engine": PoolMemory(target=1, learned=Learned(cold_s))}
    report = PoolFigures(pending, in_flight, 0.0, 1, work=work)
    return decide(scaling, {"engine": report}, memory, 0.0)[0]["engine"].target


def test_tasks_need_places_for_their_measured_time() -> None:
    # One worker begins 20 tasks of 2 s until another one is ready.
    assert size_for(20, 4, WorkFigures(0.0, 2.0)) == 1
    assert size_for(28, 4, WorkFigures(0.0, 2.0)) == 2
    # Without a cold start, each waiting task needs a place, or half a place if it takes 1 s.
    assert size_for(28, 4, WorkFigures(0.0, 2.0), cold_s=0.0) == 7
    assert size_for(28, 4, WorkFigures(0.0, 1.0), cold_s=0.0) == 4
    # Three tasks of 4 s arrive in a second: 12 places in 80 % of the time.
    assert size_for(12, 0, WorkFigures(3.0, 4.0), cold_s=0.0) == 7
    assert size_for(0, 12, WorkFigures(3.0, 4.0), cold_s=0.0) == 4
    # Tasks in flight keep their places.
    assert size_for(0, 12, WorkFigures(0.0, 4.0), cold_s=0.0) == 3


@pytest.mark.parametrize(("pending", "ended"), [(1, 0), (0, 1)])
def test_a_pool_with_a_task_keeps_a_worker(pending: int, ended: int) -> None:
    """Also with tasks that arrive and end between two looks."""
    scaling = ScalingSettings({"engine": PoolSettings(max=4, idle_s=1.0)})
    memory: Memory = {"engine": PoolMemory(target=1, learned=Learned(10.0))}
    for now_s in range(5):
        report = PoolFigures(pending, 0, 0.0, 1, work=WorkFigures(0.0, 0.1, ended))
        decisions, memory = decide(scaling, {"engine": report}, memory, float(now_s))
        assert decisions["engine"].target == 1


def test_prompts_need_workers_by_their_tokens_and_the_measured_speed() -> None:
    for waiting, arriving, size in (
        (0.0, 0.0, 1),
        # One worker computes 10,000 tokens until another one is ready.
        (10_000.0, 0.0, 1),
        (16_000.0, 0.0, 3),
        # Prompts that arrive may take 80 % of a worker's time.
        (0.0, 800.0, 1),
        (0.0, 1600.0, 5),
    ):
        assert (
            size_for(10, 2, WorkFigures(0.0, 0.1, 0, PromptFigures(waiting, arriving, 1e3))) == size
        )
    # A prompt is computed by one worker.
    assert size_for(1, 0, WorkFigures(0.0, 0.1, 0, PromptFigures(1e6, 0.0, 1e3))) == 1


def test_a_worker_that_cannot_start_is_given_up_reported_and_not_retried_for_a_minute() -> None:
    pool = Pool(PoolSettings(min=1, max=8, per_engine=1), cold_s=1e9)
    start_times, give_up_times = [], []
    for _ in range(400):
        pool.look(3)
        start_times += [pool.now_s] * pool.num_started
        give_up_times += [pool.now_s] * len(pool.decision.give_up)
    assert start_times[:6] == [2.0, 2.0, 2.0, 364.0, 364.0, 364.0]
    assert give_up_times[:3] == [304.0, 304.0, 304.0]


@given(LOOKS, pool_settings())
def test_a_start_given_up_blocks_starts_for_a_minute(
    looks: list[tuple[float, dict[str, PoolFigures | None]]], pool: PoolSettings
) -> None:
    scaling = ScalingSettings({"engine": pool})
    memory: Memory = {}
    now_s = 0.0
    given_up: dict[str, float] = {}
    for passed_s, figures in looks:
        now_s += passed_s
        decisions, memory = decide(scaling, {"engine": figures["engine"]}, memory, now_s)
        report = figures["engine"]
        num_seen = math.inf
        if report is not None:
            num_seen = report.num_running + len(report.starting)
            given_up = {
                name: at_s
                for name, at_s in given_up.items()
                if name in report.starting or now_s < at_s + RETRY_S
            }
        for decision in decisions.values():
            given_up = dict.fromkeys(decision.give_up, now_s) | given_up
            if any(now_s < at_s + RETRY_S for at_s in given_up.values()):
                assert report is None or decision.target <= num_seen


@given(st.permutations(NAMES), st.integers(0, 30), st.integers(0, 30))
def test_the_budget_goes_to_the_higher_priority(order: list[str], budget: int, load: int) -> None:
    pools = {n: PoolSettings(max=10, per_engine=1, priority=i) for i, n in enumerate(order)}
    scaling = ScalingSettings(pools, budget=budget)
    figures = {name: PoolFigures(load, 0, 0.0, 0) for name in NAMES}
    decisions, _ = decide(scaling, figures, {}, 0.0)
    left = budget
    for name in reversed(order):
        assert decisions[name].target == min(load, 10, left)
        left -= decisions[name].target


def test_pools_of_one_priority_take_turns() -> None:
    pools = {name: PoolSettings(max=10, per_engine=1) for name in NAMES}
    scaling = ScalingSettings(pools, budget=10)
    figures = {n: PoolFigures(k, 0, 0.0, 0) for n, k in zip(NAMES, (9, 1, 9), strict=True)}
    decisions, _ = decide(scaling, figures, {}, 0.0)
    assert {n: d.target for n, d in decisions.items()} == {"engine": 5, "renderer": 4, "encoder": 1}


def test_the_budget_of_a_shrunk_pool_is_used_when_its_workers_have_gone() -> None:
    pools = {"low": PoolSettings(max=4), "high": PoolSettings(max=4, per_engine=1, priority=1)}
    scaling = ScalingSettings(pools, budget=4)
    low, high = PoolFigures(64, 0, 0.0, 4), PoolFigures(3, 0, 0.0, 0)
    decisions, memory = decide(scaling, {"low": low, "high": high}, {}, 0.0)
    assert (decisions["low"].target, decisions["low"].reason) == (1, "budget")
    assert decisions["high"].target == 0
    low = PoolFigures(64, 0, 0.0, 1, num_draining=1)
    decisions, _ = decide(scaling, {"low": low, "high": high}, memory, 2.0)
    assert decisions["high"].target == 2


def test_a_request_for_a_model_wakes_all_of_its_pools() -> None:
    scaling = ScalingSettings({name: PoolSettings() for name in NAMES}, EDGES)
    reports = dict.fromkeys(NAMES, QUIET) | {"renderer": PoolFigures(0, 0, 0.0, 0, num_arrived=1)}
    decisions, _ = decide(scaling, reports, {}, 0.0)
    assert {d.target for d in decisions.values()} == {1}
    rendering = dict.fromkeys(NAMES, QUIET) | {"renderer": PoolFigures(0, 1, 0.0, 1)}
    decisions, _ = decide(scaling, rendering, {}, 0.0)
    assert [decisions[name].reason for name in NAMES] == ["demand", "woken", "woken"]


def test_the_oldest_task_makes_the_pool_a_quarter_larger_unless_something_starts() -> None:
    scaling = ScalingSettings({"engine": PoolSettings(max=20)})
    for starting, target in (({}, 10), ({"w": 1.0}, 9)):
        report = PoolFigures(16, 112, 3.0, 8, starting)
        decision = decide(scaling, {"engine": report}, {}, 0.0)[0]["engine"]
        assert decision.target == target


def test_a_pool_is_not_shrunk_below_its_pinned_workers() -> None:
    scaling = ScalingSettings({"encoder": PoolSettings(max=9, idle_s=0)})
    report = PoolFigures(0, 0, 0.0, 5, num_pinned=3)
    decision = decide(scaling, {"encoder": report}, {}, 0.0)[0]["encoder"]
    _, memory = decide(scaling, {"encoder": report}, {}, 0.0)
    decision = decide(scaling, {"encoder": report}, memory, 1.0)[0]["encoder"]
    assert (decision.target, decision.reason) == (3, "pinned")


def test_a_new_leader_keeps_what_is_there_for_idle_s() -> None:
    pool = Pool(PoolSettings(max=8), cold_s=5.0, num_running=6)
    assert [pool.look(0), pool.look(0)] == [6, 6]


def test_a_new_leader_keeps_what_the_last_one_has_planned_and_learned() -> None:
    scaling = ScalingSettings({"engine": PoolSettings(max=8)})
    memory = {"engine": PoolMemory(target=3, learned=Learned(45.0))}
    decisions, _ = decide(scaling, {"engine": QUIET}, memory, 0.0)
    assert decisions["engine"] == PoolDecision(3, (), "idle", 135.0)


def test_the_time_without_figures_is_not_idle() -> None:
    scaling = ScalingSettings({"engine": PoolSettings(max=8)})
    memory: Memory = {}
    busy, idle = PoolFigures(64, 0, 0.0, 4), PoolFigures(0, 0, 0.0, 4)
    _, memory = decide(scaling, {"engine": busy}, memory, 0.0)
    _, memory = decide(scaling, {"engine": None}, memory, 300.0)
    decisions, memory = decide(scaling, {"engine": idle}, memory, 302.0)
    assert decisions["engine"].target == 4
    decisions, _ = decide(scaling, {"engine": idle}, memory, 400.0)
    assert decisions["engine"].target == 0


@given(
    st.lists(
        st.builds(WorkerLoad, st.text(), st.integers(0, 5), st.integers(0, 1), st.booleans()),
        unique_by=lambda w: w.name,
    ),
    st.integers(-1, 8),
)
def test_victims_hold_nothing_pinned_and_are_the_least_loaded(
    workers: list[WorkerLoad], count: int
) -> None:
    chosen = choose_victims(workers, count)
    free = {worker.name: worker for worker in workers if not worker.num_pinned}
    assert len(chosen) == min(max(0, count), len(free))
    left = [worker for name, worker in free.items() if name not in chosen]
    for name in chosen:
        victim = (free[name].is_ready, free[name].num_in_flight)
        assert all(victim <= (other.is_ready, other.num_in_flight) for other in left)


def test_settings_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="min: 3 is more than max, 2"):
        PoolSettings(min=3, max=2)
    with pytest.raises(ConfigError, match="budget: 1 is less than the pools' min together, 2"):
        ScalingSettings({"engine": PoolSettings(min=2, max=2)}, budget=1)
    with pytest.raises(ConfigError, match="edges: no pool 'encoder'"):
        ScalingSettings({"engine": PoolSettings()}, (("engine", "encoder"),))
