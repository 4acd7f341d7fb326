"""The next action of a response, over every prefix of every log."""

import pytest
from hypothesis import given
from msgspec.structs import replace

from shared.protocol.items import CallItem, McpCallItem
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import (
    Answered,
    ApprovedCall,
    Asked,
    Ended,
    Listed,
    Result,
    Sending,
    Step,
)
from shared.responses.conversation import entries_of, messages_of
from shared.responses.state import ResponseState, state_of
from tests.agent.logs import ADD, BEGUN, BOOK, CALC, FUNCTION, ID, USAGE, logs
from workers.agent import plan
from workers.agent.plan import next_action


def check_calls(
    state: ResponseState, calls: list[plan.CallTool], num_sent: dict[tuple[int, int], int]
) -> None:
    pending = [call for call in state.calls.values() if call.is_pending]
    assert [action.call for action in calls] == pending
    for action in calls:
        call, attempt = action.call, action.attempt
        assert attempt == num_sent.get((call.turn, call.number), 0) == len(call.sendings)
        assert attempt == 0 or call.sendings[-1].may_repeat
        assert attempt < plan.MAX_ATTEMPTS
        assert call.tool is not None or call.paints
    assert state.num_server_calls <= state.begun.max_tool_calls  # type: ignore[union-attr]


@given(logs())
def test_every_prefix_has_one_permitted_next_action(steps: list[Step]) -> None:
    num_sent: dict[tuple[int, int], int] = {}
    for length in range(1, len(steps) + 1):
        prefix = steps[:length]
        state, last = state_of(ID, prefix), prefix[-1]
        action = next_action(state)
        # The action is a function of the log.
        assert action == next_action(state_of(ID, prefix)) or isinstance(action, plan.CallTools)
        if isinstance(last, Sending):
            num_sent[last.turn, last.call] = num_sent.get((last.turn, last.call), 0) + 1
        match action:
            case plan.CallTools(calls):
                check_calls(state, calls, num_sent)
            case plan.SettleUnknown(call):
                assert call.sendings
                assert call.is_pending
            case plan.AskModel(turn, withdrawn):
                assert turn == len(state.turns) == len(state.answers)
                assert state.pending is None
                assert turn < BEGUN.max_turns
                assert not state.approvals
                assert not state.num_function_calls
                assert withdrawn <= (turn > 0)
            case plan.ReadAnswer(turn):
                assert state.turns[-1].turn == turn == len(state.answers)
            case plan.Conclude():
                assert state.pending is None
                assert len(state.turns) == len(state.answers)
            case plan.Nothing():
                assert state.ended is not None
        assert isinstance(action, plan.Nothing) == (state.ended is not None)
        # The prompt can be made of every prefix, and each call in it has its result.
        messages = messages_of("Be brief.", entries_of(state))
        called = [call.id for message in messages for call in message.tool_calls]
        results = [message.tool_call_id for message in messages if message.role == "tool"]
        served = {item.id for item in state.output if isinstance(item, CallItem)}
        assert [name for name in called if name in served] == results
    # Every log ends.
    assert isinstance(steps[-1], Ended)


@given(logs())
def test_of_two_agents_one_writes_each_step(steps: list[Step]) -> None:
    """Two agents at one log plan alike; the fence lets one of them append, and the other reads."""
    for length in range(1, len(steps)):
        winner, loser = state_of(ID, steps[:length]), state_of(ID, steps[:length])
        assert type(next_action(winner)) is type(next_action(loser))
        # The loser applies what the winner has appended, and is where the winner is.
        for state in (winner, loser):
            state.apply(steps[length])
        assert winner.output == loser.output
        assert winner.num_steps == loser.num_steps == length + 1


ASKING = replace(CALC, approval="always")


def begun(**changes: object) -> list[Step]:
    return [replace(BEGUN, **changes), Listed(1, "calc", [ADD, BOOK])]


def answered(*names: str, turn: int = 0) -> list[Step]:
    calls = [FunctionCall(name, "{}") for name in names]
    return [Asked(2, turn), Answered(3, turn, "", calls, USAGE)]


def test_a_dead_workers_call_is_not_made_again() -> None:
    steps = [*begun(), *answered("calc__book"), Sending(4, 0, 0, 0, "k", "d", "b")]
    assert isinstance(next_action(state_of(ID, steps)), plan.SettleUnknown)
    repeatable = [*steps[:-1], Sending(4, 0, 0, 0, "k", "d", "b", may_repeat=True)]
    action = next_action(state_of(ID, repeatable))
    assert isinstance(action, plan.CallTools)
    assert [call.attempt for call in action.calls] == [1]


def test_calls_beyond_the_limit_are_refused_and_the_last_turn_has_no_tools() -> None:
    steps = [*begun(max_tool_calls=1), *answered("calc__book", "calc__add")]
    action = next_action(state_of(ID, steps))
    assert isinstance(action, plan.RefuseCall)
    assert action.why == "limit"
    steps.append(Result(4, 0, 1, "failed"))
    steps += [Sending(5, 0, 0, 0, "k", "d", "b"), Result(6, 0, 0, "result", "done")]
    state = state_of(ID, steps)
    assert next_action(state) == plan.AskModel(1, withdrawn=True)


@pytest.mark.parametrize(
    ("changes", "names", "expected"),
    [
        ({}, [], plan.Conclude("completed")),
        ({"functions": [FUNCTION]}, ["now"], plan.Conclude("completed")),
        (
            {"servers": [replace(CALC, approval="always")]},
            ["calc__add"],
            plan.Conclude("completed"),
        ),
        ({"max_output_tokens": 3}, [], plan.Conclude("completed")),
    ],
)
def test_responses_end_when_the_client_is_next(
    changes: dict[str, object], names: list[str], expected: plan.Action
) -> None:
    assert next_action(state_of(ID, [*begun(**changes), *answered(*names)])) == expected


def test_a_cancelled_response_shows_that_a_call_was_sent() -> None:
    steps = [*begun(), *answered("calc__book", "calc__add"), Sending(4, 0, 0, 0, "k", "d", "b")]
    state = state_of(ID, [*steps, Ended(5, "cancelled", 2)])
    running, unsent = state.output[1:]
    assert isinstance(running, McpCallItem)
    assert isinstance(unsent, McpCallItem)
    assert (running.status, unsent.status) == ("failed", "incomplete")
    assert "may have been carried out" in str(running.error)


def test_a_changed_schema_and_a_tool_that_is_gone_are_not_called() -> None:
    first = state_of(
        ID, [*begun(servers=[replace(CALC, approval="always")]), *answered("calc__add")]
    )
    (pending,) = first.approvals.values()
    call = ApprovedCall(pending.item.id, "calc", "add", "{}", pending.schema_digest)
    again = replace(BEGUN, approved=[call])
    assert isinstance(next_action(state_of(ID, [again, Listed(1, "calc", [ADD])])), plan.CallTools)
    changed = replace(ADD, input_schema={"type": "object"})
    action = next_action(state_of(ID, [again, Listed(1, "calc", [changed])]))
    assert isinstance(action, plan.RefuseCall)
    assert action.why == "changed"
    gone = next_action(state_of(ID, [again, Listed(1, "calc", [BOOK])]))
    assert isinstance(gone, plan.RefuseCall)
    assert gone.why == "gone"
