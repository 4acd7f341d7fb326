"""Checks of the logs of responses, and of the calls that their tool server received. Pure.

A1  every response ends
A2  a call is made at most once for each step that announces it, and such a step is repeated only
    where the configuration says that repeating is harmless
A3  each step follows from the steps before it, and indexes have no gap
A4  a call with a result was made
A5  a response completes if the fault is the only thing that goes wrong
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from shared.errors import DeadlineExceeded
from shared.protocol.steps import Answered, Asked, Begun, Ended, Listed, Result, Sending, Step
from shared.responses.state import ResponseState
from workers.agent import plan
from workers.agent.plan import next_action

PLANNED: dict[type[Step], tuple[type, ...]] = {
    Listed: (plan.ListTools,),
    Asked: (plan.AskModel,),
    Answered: (plan.ReadAnswer,),
    # Calls of one turn are made at the same time: after the step of the first, the next action of
    # another agent would be to settle it. The checks on calls hold for such steps.
    Sending: (plan.CallTools, plan.SettleUnknown),
    Result: (plan.SettleUnknown, plan.RefuseCall, plan.CallTools),
    Ended: (plan.Conclude,),
}


class AgentRun(Struct, frozen=True):
    """One response and its calls."""

    response_id: str
    steps: list[Step]
    num_made: Mapping[tuple[int, int], int]
    """Number of times that each call was made, by turn and number."""
    may_repeat: bool
    """Whether its server is configured so that calls may be made again."""
    must_complete: bool = False
    """Whether the response has no reason but the fault not to complete."""


def violations(run: AgentRun) -> Iterator[str]:
    state = ResponseState(run.response_id)
    for i, step in enumerate(run.steps):
        if (fault := _fault_of_order(state, i, step)) is not None:
            yield f"A3 {run.response_id}: {fault}"
            return
    if state.ended is None:
        yield f"A1 {run.response_id} has not ended after {len(run.steps)} steps"
    elif run.must_complete and state.ended.status != "completed":
        yield f"A5 {run.response_id} has ended as {state.ended.status}: {state.ended.error}"
    yield from _faults_of_calls(run, state)


def _fault_of_order(state: ResponseState, i: int, step: Step) -> str | None:
    """Apply a step, or return why it may not follow."""
    if step.index != i:
        return f"step {i} has the index {step.index}"
    action = next_action(state)
    is_free = isinstance(step, Begun) or (isinstance(step, Ended) and _is_of_gateway(step))
    if not is_free and not isinstance(action, PLANNED[type(step)]):
        return f"{type(step).__name__} after {type(action).__name__}"
    try:
        state.apply(step)
    except LookupError:
        return f"{type(step).__name__} of another turn"
    return None


def _is_of_gateway(end: Ended) -> bool:
    """Return whether a gateway may have ended the response: it cancels, and ends late responses."""
    is_late = end.error is not None and end.error.code == DeadlineExceeded.code
    return end.status == "cancelled" or is_late


def _faults_of_calls(run: AgentRun, state: ResponseState) -> Iterator[str]:
    for (turn, number), call in state.calls.items():
        if call.paints:  # It is a request, and repeated publications have the same id.
            continue
        num_made = run.num_made.get((turn, number), 0)
        name = f"{run.response_id} turn {turn} call {number}"
        if num_made > len(call.sendings):
            yield f"A2 {name}: made {num_made} times, with {len(call.sendings)} steps for it"
        if len(call.sendings) > 1 and not run.may_repeat:
            yield f"A2 {name}: sent {len(call.sendings)} times"
        if call.result is not None and call.result.outcome == "result" and not num_made:
            yield f"A4 {name}: has a result, and was never made"
