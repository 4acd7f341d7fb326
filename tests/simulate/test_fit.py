"""The fit finds costs that are known, and compares what the simulator and a run say."""

import random

import pytest

from ops.simulate.engine import Cost
from ops.simulate.fit.fitting import Answer, Step, compare, explained, fit_cost, overhead_s
from ops.simulate.fit.trace import MAX_PROMPT, alone, chats, to_request
from ops.simulate.routers import SharedQueue
from ops.simulate.simulation import Simulation

COST = Cost(2e-3, 4e-5, 3e-7, max_seqs=16, step_tokens=512, kv_tokens=60_000)
BLOCK = 16


def steps_of(cost: Cost, count: int = 500) -> list[Step]:
    rnd, found = random.Random(1), list[Step]()
    for _ in range(count):
        tokens, context = rnd.randint(1, 512), rnd.randint(0, 20_000)
        step_s = cost.step_s + cost.token_s * tokens + cost.context_s * context
        found.append((tokens, context, step_s))
    return found


def test_known_costs_are_found() -> None:
    fitted = fit_cost(steps_of(COST), COST)
    for name in ("step_s", "token_s", "context_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(COST, name), rel=1e-6)
    assert explained(steps_of(COST), fitted) == pytest.approx(1.0)
    assert (fitted.max_seqs, fitted.step_tokens) == (16, 512)


def test_no_cost_is_negative() -> None:
    steps = [
        (tokens, context, max(1e-4, s - 2e-8 * context))
        for tokens, context, s in steps_of(Cost(2e-3, 4e-5, 0.0))
    ]
    fitted = fit_cost(steps, COST)
    assert fitted.context_s == 0.0
    assert min(fitted.step_s, fitted.token_s) > 0.0


def test_time_outside_of_steps_is_that_of_requests_that_were_alone() -> None:
    lone = alone(5, seed=1)
    answers = [
        Answer(0.01 + COST.step_s + COST.token_s * len(turn.token_ids), 256, 0) for turn in lone
    ]
    assert overhead_s(list(zip(lone, answers, strict=True)), COST) == pytest.approx(0.01)


def test_turns_of_a_chat_begin_with_the_turn_before() -> None:
    turns = chats(300, 5.0, seed=1)
    assert len(turns) == 300
    assert [turn.at_s for turn in turns] == sorted(turn.at_s for turn in turns)
    by_chat: dict[int, tuple[int, ...]] = {}
    for turn in turns:
        before = by_chat.get(turn.chat, ())
        assert turn.token_ids[: len(before)] == before
        assert turn.lengths[-1] == len(turn.token_ids) <= MAX_PROMPT
        by_chat[turn.chat] = turn.token_ids
    assert any(len(turn.lengths) > 2 for turn in turns)


def test_a_run_that_is_as_the_simulator_says_agrees_with_it() -> None:
    turns = chats(200, 5.0, seed=2)
    requests = [to_request(turn, turn.at_s, BLOCK) for turn in turns]
    simulated = Simulation(requests, SharedQueue(), 2, 1, cost=COST).run()
    cached = round(simulated.hit_rate * 1000)
    ttft_s = sorted(simulated.ttft_s)[len(simulated.ttft_s) // 2]
    answers = [Answer(ttft_s + 0.01, 1000, cached)] * len(turns)
    hit_rate, p50, p99 = compare(turns, answers, COST, 0.01, 2, BLOCK)
    assert hit_rate.is_close
    assert p50.deviation == pytest.approx(0.0, abs=0.02)
    assert p99.simulated > p50.simulated
    slower = [Answer(2 * ttft_s + 0.02, 1000, cached // 2)] * len(turns)
    assert not any(one.is_close for one in list(compare(turns, slower, COST, 0.01, 2, BLOCK))[:2])
