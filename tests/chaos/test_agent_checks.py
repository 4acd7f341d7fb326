"""The checks of agents find what they are for."""

from hypothesis import given

from ops.chaos.agents.checks import AgentRun, violations
from ops.chaos.agents.worker import held_in
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import Answered, Asked, Ended, Listed, Result, Sending, Step
from tests.agent.logs import ADD, BEGUN, BOOK, ID, USAGE, logs

CALLED: list[Step] = [
    BEGUN,
    Listed(1, "calc", [ADD, BOOK]),
    Asked(2, 0),
    Answered(3, 0, "", [FunctionCall("calc__book", "{}")], USAGE),
    Sending(4, 0, 0, 0, "k", "d", "b"),
    Result(5, 0, 0, "result", "booked"),
    Asked(6, 1),
    Answered(7, 1, "Booked.", [], USAGE),
    Ended(8, "completed", 2),
]


def found(steps: list[Step], num_calls: int = 1) -> set[str]:
    run = AgentRun(ID, steps, {(0, 0): num_calls}, may_repeat=False, must_complete=True)
    return {text[:2] for text in violations(run)}


@given(logs())
def test_logs_of_agents_have_no_violation(steps: list[Step]) -> None:
    calls = {(step.turn, step.call): 1 for step in steps if isinstance(step, Sending)}
    assert list(violations(AgentRun(ID, steps, calls, may_repeat=True))) == []


def test_each_check_finds_its_violation() -> None:
    assert found(CALLED) == set()
    assert found(CALLED[:-1]) == {"A1"}
    assert found(CALLED, num_calls=2) == {"A2"}
    twice: list[Step] = [*CALLED[:5], Sending(5, 0, 0, 1, "k", "d", "c")]
    assert "A2" in found(twice)
    assert found([*CALLED[:5], Asked(5, 1)]) == {"A3"}
    assert found([*CALLED[:5], CALLED[4]]) == {"A3"}
    assert found(CALLED, num_calls=0) == {"A4"}
    assert found([*CALLED[:-1], Ended(8, "cancelled", 2)]) == {"A5"}


def test_an_agent_holds_what_it_has_taken_and_not_left() -> None:
    assert held_in("") == set()
    assert held_in("+a\n+b\n-a\n") == {"b"}
    # The same response a second time, because the first delivery was late.
    assert held_in("+a\n+a\n-a\n") == {"a"}
