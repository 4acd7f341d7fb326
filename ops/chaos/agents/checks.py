"""What must hold of the logs of responses, and of the calls that their tool server has seen. Pure.

A1  every response ends
A2  a call is made at most once for each step that says so, and such a step is repeated only where
    the configuration says that repeating is harmless
A3  each step follows from the steps before it, and indexes have no gap
A4  a call with a result was made
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from shared.protocol.steps import Answered, Asked, Begun, Ended, Listed, Result, Sending, Step
from shared.responses.state import ResponseState
from workers.agent import plan
from workers.agent.plan import next_action

PLANNED: dict[type[Step], tuple[type, ...]] = {
    Listed: (plan.ListTools,),
    Asked: (plan.AskModel,),
    Answered: (plan.ReadAnswer,),
    # Calls of one turn are made at the same time: behind the step of one, an agent that comes then
    # would settle it. The checks on calls hold for such steps.
    Sending: (plan.CallTools, plan.SettleUnknown),
    Result: (plan.SettleUnknown, plan.RefuseCall, plan.CallTools),
    Ended: (plan.Conclude,),
}


class AgentRun(Struct, frozen=True):
    """One response, and what became of its calls."""

    response_id: str
    steps: list[Step]
    made: Mapping[tuple[int, int], int]
    """How often each call was made, by turn and number."""
    may_repeat: bool
    """Whether its server is configured so that calls may be made again."""


def violations(run: AgentRun) -> Iterator[str]:
    state = ResponseState(run.response_id)
    for i, step in enumerate(run.steps):
        if step.index != i:
            yield f"A3 {run.response_id}: step {i} has the index {step.index}"
            return
        action = next_action(state)
        # A gateway may cancel at any moment.
        is_free = isinstance(step, Begun) or (
            isinstance(step, Ended) and step.status == "cancelled"
        )
        if not is_free and not isinstance(action, PLANNED[type(step)]):
            yield f"A3 {run.response_id}: {type(step).__name__} after {type(action).__name__}"
            return
        try:
            state.apply(step)
        except LookupError:
            yield f"A3 {run.response_id}: {type(step).__name__} of another turn"
            return
    if state.ended is None:
        yield f"A1 {run.response_id} has not ended after {len(run.steps)} steps"
    for (turn, number), call in state.calls.items():
        made = run.made.get((turn, number), 0)
        name = f"{run.response_id} turn {turn} call {number}"
        if made > len(call.sent):
            yield f"A2 {name}: made {made} times, with {len(call.sent)} steps that say so"
        if len(call.sent) > 1 and not run.may_repeat:
            yield f"A2 {name}: sent {len(call.sent)} times"
        if call.result is not None and call.result.outcome == "result" and not made:
            yield f"A4 {name}: has a result, and was never made"
