"""Choice of the next action of a response, from the state in its log. Pure.

An agent that takes over a response calls `next_action` first. So the log alone decides which calls
are repeated, and which must not be.
"""

from dataclasses import dataclass
from typing import Literal

from shared.protocol.steps import GIVEN_TURN
from shared.responses.calls import ServerCall
from shared.responses.state import UNKNOWN_OUTCOME, ResponseState
from shared.responses.tools import schema_digest

MAX_ATTEMPTS = 3
"""Limit on attempts at one call, if it may be repeated."""


@dataclass(frozen=True, slots=True)
class ListTools:
    """Ask a server for its tools."""

    label: str


@dataclass(frozen=True, slots=True)
class AskModel:
    """Publish the request of the next turn."""

    turn: int
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """Follow the answer of a turn to its end."""

    turn: int


@dataclass(frozen=True, slots=True)
class CallTool:
    """Make a call, or publish the request of an image, after a Sending step."""

    call: ServerCall
    attempt: int


@dataclass(frozen=True, slots=True)
class CallTools:
    """Make calls of one turn at the same time."""

    calls: list[CallTool]


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """Append the result of a call that is not made."""

    call: ServerCall
    why: Literal["limit", "gone", "changed"]


@dataclass(frozen=True, slots=True)
class SettleUnknown:
    """Append an unknown outcome: the call was sent, and the agent that sent it is gone."""

    call: ServerCall


@dataclass(frozen=True, slots=True)
class Conclude:
    """End the response."""

    status: Literal["completed", "incomplete", "failed"]
    reason: str | None = None
    message: str | None = None
    field: str | None = None
    """The field of the request that is wrong, if it is the client's fault."""
    retryable: bool = False
    """Whether another response may succeed."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """The response has ended, or has no beginning."""


Action = (
    ListTools | AskModel | ReadAnswer | CallTools | RefuseCall | SettleUnknown | Conclude | Nothing
)


def next_action(state: ResponseState) -> Action:
    begun = state.begun
    if begun is None or state.ended is not None:
        return Nothing()
    for server in begun.servers:
        if server.label not in state.listings:
            return ListTools(server.label)
    if not state.turns and (fault := _fault_of_tools(state)) is not None:
        return fault
    if any(call.result is not None and call.result.fatal for call in state.calls.values()):
        return Conclude("failed", message=UNKNOWN_OUTCOME)
    if state.pending is not None:
        return _next_of_calls(state)
    if len(state.turns) > len(state.answers):
        return ReadAnswer(len(state.answers))
    return _next_turn(state)


def _fault_of_tools(state: ResponseState) -> Conclude | None:
    """Return how the response ends if it names a tool that its servers do not have."""
    assert state.begun is not None
    label_to_names = {
        label: None if listed.error is not None else {tool.name for tool in listed.tools}
        for label, listed in state.listings.items()
    }
    for server in state.begun.servers:
        names = None if server.allowed is None else server.allowed.tool_names
        listed_names = label_to_names[server.label]
        for name in names or [] if listed_names is not None else []:
            if name not in (listed_names or ()):
                return _no_tool(server.label, name, "tools.allowed_tools")
    choice = state.begun.choice
    for ref in choice.tools or []:
        if ref.label is None:
            continue
        listed_names = label_to_names.get(ref.label)
        if listed_names is None and choice.mode == "required":
            listed = state.listings[ref.label]
            message = f"tool_choice needs the tools of {ref.label}: {listed.error}"
            return Conclude("failed", message=message, retryable=listed.retryable)
        if ref.name is not None and listed_names is not None and ref.name not in listed_names:
            return _no_tool(ref.label, ref.name, "tool_choice")
    return None


def _no_tool(label: str, name: str, field: str) -> Conclude:
    message = f"{field}: the server {label} has no tool {name!r}"
    return Conclude("failed", message=message, field=field)


def _next_of_calls(state: ResponseState) -> Action:
    """Settle the calls that are not made, one by one; then make the others at the same time."""
    calls: list[CallTool] = []
    for call in state.calls.values():
        if call.is_pending:
            action = _next_of_call(state, call)
            if not isinstance(action, CallTool):
                return action
            calls.append(action)
    return CallTools(calls)


def _next_of_call(state: ResponseState, call: ServerCall) -> CallTool | RefuseCall | SettleUnknown:
    if call.paints and not call.over_limit:
        return CallTool(call, len(call.sendings))
    if call.sendings:
        last = call.sendings[-1]
        if last.may_repeat and len(call.sendings) < MAX_ATTEMPTS:
            return CallTool(call, len(call.sendings))
        return SettleUnknown(call)
    if call.over_limit:
        return RefuseCall(call, "limit")
    if call.tool is None or call.tool.listed is None:
        return RefuseCall(call, "gone")
    if call.turn == GIVEN_TURN:
        assert state.begun is not None
        approved = state.begun.approved[call.number]
        if schema_digest(call.tool.listed) != approved.schema_digest:
            return RefuseCall(call, "changed")
    elif not call.tool.may_call:
        return RefuseCall(call, "gone")
    return CallTool(call, 0)


def _next_turn(state: ResponseState) -> Action:
    begun = state.begun
    assert begun is not None
    if not state.answers:
        writes = begun.painter is None or begun.painter.prompt is None
        return AskModel(0) if writes and not state.approvals else Conclude("completed")
    last = state.answers[-1]
    used = state.usage.completion_tokens
    is_over = begun.max_output_tokens is not None and used >= begun.max_output_tokens
    if last.finish_reason == "length":
        return Conclude("incomplete", "max_output_tokens")
    waits_for_client = state.num_function_calls > 0 or bool(state.approvals)
    if waits_for_client or not last.calls:
        return Conclude("completed")
    if is_over:
        return Conclude("incomplete", "max_output_tokens")
    turn = len(state.answers)
    if turn >= begun.max_turns:
        return Conclude(
            "failed", message=f"the response has reached its limit of {begun.max_turns} turns"
        )
    return AskModel(turn, withdrawn=state.num_server_calls >= begun.max_tool_calls)
