"""The simulator: exact figures of small runs, and what every run must keep."""

import math

import pytest

from ops.simulate.engine import Cost, Engine, Request
from ops.simulate.loads import LOADS, bursts, bursty_chat, recorded
from ops.simulate.report import ROUTERS, SCALERS, run_router, run_scaler
from ops.simulate.routers import SharedQueue, slot_of
from ops.simulate.simulation import Figures, Simulation, quantile

EXPECTED: dict[str, tuple[float, float, float, int]] = {
    "shared queue, in turns": (0.043, 0.159, 0.3607, 0),
    "slots": (0.023, 0.17, 0.6883, 502),
}
EXPECTED_SCALED: dict[str, tuple[float, float, int]] = {
    "own policy": (0.045, 1.671, 17),
    "KEDA": (0.046, 2.323, 17),
    "KEDA, 5 s and 120 s": (0.049, 1.443, 18),
    "oracle": (0.042, 0.482, 19),
}


def summary(figures: Figures) -> tuple[float, float, float, int]:
    ttft = quantile(figures.ttft_s, 0.5), quantile(figures.ttft_s, 0.99)
    return (*ttft, round(figures.hit_rate, 4), figures.num_stolen)


@pytest.mark.parametrize("router", ROUTERS)
def test_sixteen_engines_have_exactly_these_figures(router: str) -> None:
    figures = run_router(router, "bursty chat", 16, 5000, seed=1)
    assert figures.num_ended == 5000
    assert summary(figures) == EXPECTED[router]


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scaled_pool_has_exactly_these_figures(scaler: str) -> None:
    requests = bursts(3000, 20.0, seed=1, gap_s=100.0)
    figures = run_scaler(scaler, requests, 16)
    assert figures.num_ended == 3000
    values = quantile(figures.ttft_s, 0.5), round(figures.engine_s / 3000, 3), figures.num_started
    assert values == EXPECTED_SCALED[scaler]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("load", LOADS)
def test_every_request_is_answered_and_nothing_is_left(router: str, load: str) -> None:
    make, rate = LOADS[load]
    requests = make(500, 3 * rate, 2)
    simulation = Simulation(requests, ROUTERS[router](3), 3)
    figures = simulation.run()
    assert figures.num_ended == 500
    assert simulation.num_in_flight() == 0
    for engine in simulation.engines:
        assert (engine.context, engine.todo, engine.queued, engine.num_held) == (0, 0, 0, 0)
        assert engine.cached == sum(engine.cache.values()) <= engine.cost.kv_tokens


def test_a_log_is_a_load() -> None:
    lines = [
        '{"event": "finished", "timestamp": "2026-11-28T03:00:09Z", "age_ms": 2000.0,'
        ' "prompt_tokens": 700, "generated_tokens": 20}\n',
        '{"event": "began", "timestamp": "2026-11-28T03:00:01Z", "prompt_tokens": 5}\n',
        "ready\n",
        '{"event": "finished", "timestamp": "2026-11-28T03:00:06.5Z", "age_ms": 4500.0,'
        ' "prompt_tokens": 30, "generated_tokens": 0}\n',
    ]
    requests = recorded(lines)
    assert [(r.arrived_s, r.prompt, r.answer) for r in requests] == [(0.0, 30, 1), (5.0, 700, 20)]


def test_a_lone_request_takes_what_the_cost_says() -> None:
    cost = Cost()
    request = Request(0.0, 3000, 11, (((0, 1), 3000), ((0, 2), 3011)))
    figures = Simulation([request], SharedQueue(), 1).run()
    first_s = 2 * cost.step_s + 3000 * cost.token_s
    assert figures.ttft_s == [pytest.approx(first_s)]
    context = sum(range(3000, 3010))
    decode_s = 10 * (cost.step_s + cost.token_s) + context * cost.context_s
    assert figures.answer_s == [pytest.approx(first_s + decode_s)]


def test_a_leap_ends_with_the_step_that_is_under_way() -> None:
    engine = Engine(1, 0.0, Cost())
    engine.add(Request(0.0, 100, 50, (((0, 1), 100), ((0, 2), 150))))
    engine.admit(math.inf)
    first_s = engine.plan(0.0)
    assert first_s is not None
    engine.settle()
    end_s = engine.plan(first_s)
    assert end_s is not None
    assert engine.steps_ahead == 49
    step_s = (end_s - first_s) / 49
    cut_s = engine.cut(first_s + 2.5 * step_s)
    assert cut_s == pytest.approx(first_s + 3 * step_s, rel=1e-4)
    assert engine.steps_ahead == 3


def test_the_prefix_cache_drops_what_was_used_least_recently() -> None:
    engine = Engine(1, 0.0, Cost(kv_tokens=250))
    for number in (1, 2, 1, 3):
        engine.add(Request(0.0, 100, 1, (((number,), 100), ((number, 0), 101))))
        engine.admit(math.inf)
        engine.plan(0.0)
        engine.settle()
    assert engine.cache.keys() >= {(1,), (3,)}
    assert (2,) not in engine.cache
    assert engine.cached <= 250


def test_questions_about_one_image_have_one_slot_and_so_do_chats() -> None:
    requests = bursty_chat(3000, 100.0, 1)
    by_chat: dict[int, set[int]] = {}
    for request in requests:
        for key, _ in request.chain[1:-1]:
            if key[0] == 1:
                by_chat.setdefault(key[1], set()).add(slot_of(request, 64))
    assert all(len(slots) == 1 for slots in by_chat.values())
    hot = {slot_of(request, 64) for request in LOADS["one hot image"][0](100, 100.0, 1)}
    assert len(hot) <= 2
