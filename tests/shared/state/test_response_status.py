"""Status of a response for an operator, and its dead letter."""

import secrets

import pytest

from shared.bus.bus import Bus
from shared.errors import InvalidRequest, NotFound
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json, to_msgpack
from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.messages import DeadLetter, Heartbeat
from shared.protocol.records import ErrorInfo, Usage
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import (
    Answered,
    Asked,
    Begun,
    Decided,
    Ended,
    Listed,
    ResponseTask,
    Sending,
    ServerUse,
    Step,
)
from shared.state import dead_letters
from shared.state.response_status import find_any_tenants
from shared.state.step_log import StepLog

CALLED = Answered(0, 0, "", [FunctionCall("calc__add", "{}")], Usage(1, 1))
LISTED = Listed(0, "calc", [ListedTool("add", {"type": "object"})])


def begun(approval: str) -> Begun:
    uses = [ServerUse("calc", approval=approval)]  # type: ignore[arg-type]
    return Begun(0, 1, "m", "alice", [MessageItem("user", "Hi")], {}, servers=uses, parser="hermes")


async def test_the_status_of_a_response_has_its_place_and_the_reason_of_its_wait(bus: Bus) -> None:
    beat = Heartbeat("agent", "agent-of-status", "0", 1, ["m"], {})
    log = StepLog(bus, "alice", f"resp_{secrets.token_hex(8)}")
    assert await find_any_tenants(bus, log.response_id) is None
    rows = []
    sending = Sending(0, 0, 0, 0, "k", "d", "b")
    steps: list[Step] = [begun("never"), LISTED, Asked(0, 0), CALLED, sending]
    for step in steps:
        await log.append(step)
        if log.state.num_steps > 1:
            await bus.heartbeats.publish(beat.worker, to_json(beat))
            status = await find_any_tenants(bus, log.response_id)
            assert status is not None
            rows.append((status.state, status.turn, status.call, status.why))
    turn = f"the model writes its turn: pagemill where {log.response_id}~t0@alice"
    reason = "a call was sent 1 times, and has no result yet"
    assert rows == [
        ("in_progress", None, None, "an agent is about to take the next step"),
        ("in_progress", 0, None, turn),
        ("in_progress", 0, "calc.add", "a call is about to be sent"),
        ("in_progress", 0, "calc.add", reason),
    ]
    asking = StepLog(bus, "alice", f"resp_{secrets.token_hex(8)}")
    steps = [begun("always"), LISTED, Asked(0, 0), CALLED, Ended(0, "completed", 2)]
    for step in steps:
        await asking.append(step)
    (name,) = asking.state.approvals
    status = await find_any_tenants(bus, asking.response_id)
    assert status is not None
    assert (status.state, status.why) == ("completed", f"a person must decide on {name}")
    await asking.append(Decided(0, name, False, "resp_2"))
    status = await find_any_tenants(bus, asking.response_id)
    assert status is not None
    assert status.why == "its log has its last step"


async def test_a_dead_response_is_given_to_the_agents_again_unless_it_has_ended(bus: Bus) -> None:
    log = StepLog(bus, "alice", f"resp_{secrets.token_hex(8)}")
    await log.append(begun("never"))
    subject, task = subjects.response("m"), to_json(ResponseTask(log.response_id, "alice"))
    error = ErrorInfo("overloaded", "the store is full", None, "server", retryable=True)
    job_id = names.job_id("response", log.response_id, "alice")
    letter = DeadLetter(
        "agent", "agent-1", "0", subject, job_id, 3, error, "", [], b"", task, 9, 1.0
    )
    name = subjects.dead("agent", job_id)
    await bus.publish(name, to_msgpack(letter), log.response_id)
    await bus.purge(subjects.RESPONSES_STREAM, subjects.RESPONSES_FILTER)
    await dead_letters.requeue_response(bus, letter)
    assert (await bus.figures.size(subjects.RESPONSES_STREAM))[0] == 1
    with pytest.raises(NotFound):
        await dead_letters.find(bus, job_id)
    await log.append(Ended(0, "failed", 2))
    with pytest.raises(InvalidRequest, match="has ended"):
        await dead_letters.requeue_response(bus, letter)
