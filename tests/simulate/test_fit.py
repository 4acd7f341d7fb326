"""The fit finds costs and delays that are known, and is judged by what it has not seen."""

import random
from pathlib import Path

import msgspec
import pytest

from ops.simulate.engine import Cost
from ops.simulate.fit.fitted import WINDOW_S, FittedSimulation, Samples, is_judged
from ops.simulate.fit.fitting import compare, explained, fit, fit_cost
from ops.simulate.fit.measurement import Answer, FirstToken, Step, mark_shared, read_lines
from ops.simulate.fit.trace import MAX_PROMPT, chats, strangers, to_request
from ops.simulate.routers import SharedQueue
from ops.simulate.simulation import Simulation

COST = Cost(2e-3, 4e-5, 3e-7, max_seqs=16, step_tokens=512, kv_tokens=60_000)
BLOCK = 16
BEFORE_S, AFTER_S = 0.02, 0.01


def steps_of(cost: Cost, count: int = 500, slowdown: float = 1.0) -> list[Step]:
    rnd, found = random.Random(1), list[Step]()
    for number in range(count):
        tokens, context = rnd.randint(1, 512), rnd.choice((0, rnd.randint(1, 20_000)))
        step_s = cost.step_s + cost.token_s * tokens + cost.context_s * context
        began_s, shared = 0.1 * number, rnd.random() < 0.5
        ended_s = began_s + slowdown * step_s
        found.append(
            Step(began_s, ended_s, step_s, tokens, context, rnd.random() < 0.5, is_shared=shared)
        )
    return found


def answers_of(num_requests: int, cost: Cost) -> list[Answer]:
    """Answers of engines that are as the simulator says, behind delays that never change."""
    turns = chats(num_requests, 5.0, seed=2)
    requests = [to_request(turn, turn.at_s, BLOCK) for turn in turns]
    simulation = Simulation(requests, SharedQueue(), 2, 1, cost=cost)
    simulation.counted_from_s = 0.0
    simulated = simulation.run()
    ttft_s = sorted(simulated.ttft_s)[num_requests // 2]
    answer_s = sorted(simulated.answer_s)[num_requests // 2]
    found = list[Answer]()
    for turn in turns:
        added_s = turn.at_s + BEFORE_S
        first = FirstToken("", added_s, added_s + ttft_s)
        cached = int(simulated.hit_rate * len(turn.token_ids))
        ended_s = added_s + answer_s + AFTER_S
        found.append(Answer(turn, turn.at_s, first.ended_s + AFTER_S, ended_s, cached, first))
    return found


def test_known_costs_are_found() -> None:
    fitted = fit_cost(steps_of(COST), COST)
    for name in ("step_s", "token_s", "context_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(COST, name), rel=1e-6)
    assert explained(steps_of(COST), fitted) == pytest.approx(1.0)
    assert (fitted.max_seqs, fitted.step_tokens) == (16, 512)


def test_no_cost_is_negative() -> None:
    steps = [
        msgspec.structs.replace(step, cpu_s=max(1e-4, step.cpu_s - 2e-8 * step.context))
        for step in steps_of(Cost(2e-3, 4e-5, 0.0))
    ]
    fitted = fit_cost(steps, COST)
    assert fitted.context_s == 0.0
    assert min(fitted.step_s, fitted.token_s) > 0.0


def test_times_outside_of_steps_are_those_of_the_fitted_windows() -> None:
    answers = answers_of(400, COST)
    assert answers[0].before_s == pytest.approx(BEFORE_S)
    assert answers[0].after_s == pytest.approx(AFTER_S)
    fitted = fit(answers, steps_of(COST), COST)
    rnd = random.Random(1)
    for at_s in (0.0, WINDOW_S, 3 * WINDOW_S):
        assert fitted.before_s.draw(at_s, rnd) == pytest.approx(BEFORE_S)
        assert fitted.after_s.draw(at_s, rnd) == pytest.approx(AFTER_S)


def test_steps_take_as_many_times_longer_as_those_of_the_fitted_windows() -> None:
    fitted = fit(answers_of(50, COST), steps_of(COST, slowdown=3.0), COST)
    assert len(fitted.slowdowns) == 8
    for samples in fitted.slowdowns.values():
        assert samples.draw(WINDOW_S, random.Random(1)) == pytest.approx(3.0)
    slow, fast = (
        FittedSimulation(answers, one, 2, BLOCK, seed=1).run().ttft_s[0]
        for one in (fitted, fit(answers_of(50, COST), steps_of(COST), COST))
        for answers in [answers_of(50, COST)]
    )
    outside_s = BEFORE_S + AFTER_S
    assert slow - outside_s > 2.0 * (fast - outside_s)


def test_a_window_is_judged_by_the_window_before_it_alone() -> None:
    samples = Samples([(0.0, 1.0), (2 * WINDOW_S, 2.0)])
    rnd = random.Random(1)
    assert not is_judged(0.0)
    assert is_judged(WINDOW_S)
    assert {samples.draw(at_s, rnd) for at_s in (0.1, WINDOW_S, 1.9 * WINDOW_S)} == {1.0}
    assert samples.draw(3 * WINDOW_S, rnd) == 2.0
    answers, steps = answers_of(200, COST), steps_of(COST)
    seen = fit(answers, steps, COST)
    # Whatever happens in judged windows, the fit is the same.
    for number, answer in enumerate(answers):
        if is_judged(answer.sent_s):
            other = FirstToken("", answer.sent_s + 9.0, answer.sent_s + 9.5)
            answers[number] = Answer(answer.turn, answer.sent_s, 99.0, 99.0, 0, other)
    kept = [step for step in steps if not is_judged(step.began_s)]
    unseen = fit(answers, kept, COST)
    assert unseen.cost == seen.cost
    for at_s in (0.0, WINDOW_S):
        assert unseen.before_s.draw(at_s, rnd) == pytest.approx(BEFORE_S)


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
    first, second = strangers(2, seed=1)
    assert first.token_ids != second.token_ids


def test_a_run_that_is_as_the_simulator_says_agrees_with_it() -> None:
    answers = answers_of(400, COST)
    fitted = fit(answers, steps_of(COST), COST)
    found = {one.name: one for one in compare(answers, fitted, 2, BLOCK, 1)}
    for name in ("prompt tokens from cache", "TTFT p50", "answer p50", "answers a second"):
        assert found[name].is_close, found[name]
    assert found["TTFT p99"].simulated > found["TTFT p90"].simulated > found["TTFT p50"].simulated
    slow = fit(answers, steps_of(COST, slowdown=4.0), COST)
    assert not {one.name: one for one in compare(answers, slow, 2, BLOCK, 1)}["TTFT p50"].is_close


def test_lines_are_read_from_the_beginning_of_the_run(tmp_path: Path) -> None:
    lines = [
        Step(8.0, 9.0, 0.5, 1, 0, False),
        Step(11.0, 13.0, 0.5, 7, 3, True),
        FirstToken("a", 11.0, 13.0),
    ]
    (tmp_path / "1.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
    steps, first = read_lines(tmp_path, began_s=10.0)
    assert steps == [Step(1.0, 3.0, 0.5, 7, 3, True)]
    assert first == {"a": FirstToken("a", 1.0, 3.0)}


def test_steps_know_whether_another_engine_was_in_one() -> None:
    spans = [[(0.0, 2.0), (5.0, 6.0)], [(1.0, 3.0), (4.0, 4.5)]]
    engines = [[Step(b, e, 0.1, 1, 1, False) for b, e in engine] for engine in spans]
    assert [step.is_shared for step in mark_shared(engines)] == [False, False, True, False]
