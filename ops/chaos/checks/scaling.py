"""Invariant I15: a scaled pool is as large as its work needs, for no longer than that, and drains.

The size of the pool is counted from its processes, and its work from the clients' requests. No
figure of the autoscaler is used.
"""

from collections.abc import Iterator
from statistics import median

from ops.chaos.checks.recorded_run import RecordedRun, Violation
from ops.chaos.fake_model import BLOCK_SIZE, MAX_BATCHED_TOKENS
from ops.chaos.history import Drained, Event, Fault, ProcessExited, Ready, Started
from ops.chaos.plan import Scaled
from ops.simulate.autoscaling import OwnPolicy
from ops.simulate.engine import Cost, Request
from ops.simulate.routers import SharedQueue
from ops.simulate.simulation import Figures, Simulation
from shared.scaling.memory import Learned, delay_of
from shared.scaling.pools import PoolSettings

ROLE = "engine"
# Beyond the learned delay, from the last answer until no process is left.
ZERO_S = 10.0
# Figures are up to two seconds old, and a client sees an end a little later than the broker.
MARGIN_S = 3.0
LOOK_S = 1.0


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield the violations of a run with a scaled pool; other runs have none."""
    if (scaled := run.settings.scaled) is not None:
        for check in (_drain_faults, _size_faults, _end_faults):
            for subject, text in check(run, scaled):
                yield Violation("I15", subject, text)


def measure(run: RecordedRun) -> dict[str, float]:
    """Return the figures of a scaled pool, and the simulator's engine time for these requests."""
    if run.settings.scaled is None or not run.ended:
        return {}
    simulated = simulate(run, run.settings.scaled)
    return {
        "cold_start_s": cold_start_s(run),
        "peak_engines": _peak(run),
        "engine_s": engine_s(run),
        "simulated_engine_s": simulated.engine_s,
        "zero_after_s": _last_exit(run) - max(run.ended.values()),
    }


# -- checks -----------------------------------------------------------------------------------


def _drain_faults(run: RecordedRun, scaled: Scaled) -> Iterator[tuple[str, str]]:
    """Check that each drained worker ended by itself, unless the run killed it."""
    codes = {e.pid: e.code for e in _own(run) if isinstance(e, ProcessExited)}
    killed = {e.pid for e in run.pool if isinstance(e, Fault) and e.kind == "kill"}
    for event in _own(run):
        if isinstance(event, Drained) and event.pid and event.pid not in killed:
            code = codes.get(event.pid)
            if code != 0:
                yield f"{ROLE} {event.pid}", f"was scaled down, and ended with code {code}"


def _size_faults(run: RecordedRun, scaled: Scaled) -> Iterator[tuple[str, str]]:
    """Check that the pool grows to the size that its work needs, and keeps busy workers."""
    peak = _peak(run)
    need = _needed(run, scaled, len(run.accepted))
    if peak != need:
        yield "pool", f"had {peak} workers at most instead of {need}"
    ready = {event.pid for event in _own(run) if isinstance(event, Ready)}
    for event, left in _sizes(run):
        if isinstance(event, Drained) and event.pid in ready:
            need = _needed(run, scaled, _num_open(run, event.t))
            if left < need:
                name = f"{ROLE} {event.pid}"
                yield name, f"was scaled down, which left {left} workers for the work of {need}"


def _needed(run: RecordedRun, scaled: Scaled, num_requests: int) -> int:
    return min(scaled.max, -(-num_requests // scaled.per_engine))


def _num_open(run: RecordedRun, t: float) -> int:
    """Return the number of requests that were certainly in a queue or in flight at a time."""
    return sum(
        accepted < t - MARGIN_S and run.ended.get(id, t + 2 * MARGIN_S) > t + MARGIN_S
        for id, accepted in run.accepted.items()
    )


def _end_faults(run: RecordedRun, scaled: Scaled) -> Iterator[tuple[str, str]]:
    """Check that the pool returns to zero in time, and costs little more than without faults."""
    if alive := _alive(run):
        yield "pool", f"{len(alive)} workers are left"
    elif run.ended and (late_s := _last_exit(run) - max(run.ended.values())) > (
        bound_s := delay_of(_pool(scaled), _learned(run, scaled)).for_s + ZERO_S
    ):
        yield "pool", f"at zero {late_s:.1f} s after the last answer, {bound_s:.1f} s are allowed"
    if scaled.max_engine_s and run.ended:
        used_s, simulated_s = engine_s(run), simulate(run, scaled).engine_s
        if used_s > scaled.max_engine_s * simulated_s:
            yield "pool", f"used {used_s:.0f} engine-seconds, the simulator {simulated_s:.0f}"


# -- figures ----------------------------------------------------------------------------------


def _own(run: RecordedRun) -> list[Event]:
    """Return the events of the pool's processes since the first request, in order."""
    began = _began(run)
    kinds = (Started, Ready, Drained, ProcessExited)
    events = [e for e in run.pool if isinstance(e, kinds) and e.role == ROLE and e.t >= began]
    return sorted(events, key=lambda event: event.t)


def _began(run: RecordedRun) -> float:
    return min(sessions[0].opened.t for sessions in run.sessions.values())


def _sizes(run: RecordedRun) -> Iterator[tuple[Event, int]]:
    """Yield the number of the pool's processes that do not drain, after each event."""
    present, gone = set[int](), set[int]()
    for event in _own(run):
        match event:
            case Started():
                present.add(event.pid)
            case ProcessExited():
                present.discard(event.pid)
            case Drained():
                gone.add(event.pid)
        yield event, len(present - gone)


def _peak(run: RecordedRun) -> int:
    return max((size for _, size in _sizes(run)), default=0)


def _alive(run: RecordedRun) -> set[int]:
    started = {event.pid for event in _own(run) if isinstance(event, Started)}
    return started - {event.pid for event in _own(run) if isinstance(event, ProcessExited)}


def _last_exit(run: RecordedRun) -> float:
    exits = [event.t for event in _own(run) if isinstance(event, ProcessExited)]
    return max(exits, default=0.0)


def engine_s(run: RecordedRun) -> float:
    """Return the seconds from start to end of all of the pool's processes together."""
    ends = {event.pid: event.t for event in _own(run) if isinstance(event, ProcessExited)}
    starts = {event.pid: event.t for event in _own(run) if isinstance(event, Started)}
    return sum(ends[pid] - start for pid, start in starts.items() if pid in ends)


def cold_start_s(run: RecordedRun) -> float:
    """Return the median time from the start of a process until it is ready."""
    return median([event.after_s for event in _own(run) if isinstance(event, Ready)] or [0.0])


def _pool(scaled: Scaled) -> PoolSettings:
    return PoolSettings(
        max=scaled.max,
        per_engine=scaled.per_engine,
        idle_s=scaled.idle_s,
        start_timeout_s=scaled.start_timeout_s,
    )


def _learned(run: RecordedRun, scaled: Scaled) -> Learned:
    """Return the measurements of the pool before the load, which a request has warmed up."""
    began = _began(run)
    times = [e.t for e in run.pool if isinstance(e, Drained) and e.role == ROLE and e.t < began]
    gaps_s = (began - max(times) + scaled.idle_s,) if times else ()
    return Learned(cold_start_s(run), gaps_s)


def simulate(run: RecordedRun, scaled: Scaled) -> Figures:
    """Simulate the same requests at the same times, with the product's policy and no fault.

    The simulated engine's step takes as long as the fake one sleeps, and nothing else takes time
    but a start, which takes as long as in the run.
    """
    s, began = run.settings, _began(run)
    cost = Cost(
        step_s=s.step_ms / 1000,
        token_s=0.0,
        context_s=0.0,
        max_seqs=s.max_num_seqs,
        step_tokens=MAX_BATCHED_TOKENS,
        kv_tokens=s.num_blocks * BLOCK_SIZE,
    )
    requests = []
    for number, (id, sessions) in enumerate(run.sessions.items()):
        expected = run.expected[id]
        prompt = expected.prompt_tokens
        answer = max(1, *(len(choice.token_ids) for choice in expected.choices))
        chain = (((0, number), prompt), ((1, number), prompt + answer))
        requests.append(Request(sessions[0].opened.t - began, prompt, answer, chain))
    requests.sort(key=lambda request: request.arrived_s)
    learned = _learned(run, scaled)
    policy = OwnPolicy(_pool(scaled), cold_start_s(run), LOOK_S, learned)
    return Simulation(requests, SharedQueue(), 0, policy, cost).run()
