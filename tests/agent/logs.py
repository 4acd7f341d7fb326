"""Logs of steps for tests: any log that an agent may write, and what its calls may lead to."""

from hypothesis import strategies as st
from msgspec.structs import replace

from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.records import Usage
from shared.protocol.requests import FunctionCall, FunctionDefinition, Tool
from shared.protocol.steps import (
    Answered,
    ApprovedCall,
    Asked,
    Begun,
    Choice,
    Ended,
    Listed,
    PaintTool,
    Result,
    Sending,
    ServerUse,
    Step,
)
from shared.responses.state import ResponseState, state_of
from shared.responses.tools import PAINT, schema_digest
from workers.agent import plan
from workers.agent.plan import _next_of_call, next_action

ID = "resp_1"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = ListedTool("add", SCHEMA, "Adds.", {"readOnlyHint": True})
BOOK = ListedTool("book", SCHEMA, "Books.")
FUNCTION = Tool(FunctionDefinition("now"))
CALC = ServerUse("calc", approval="never")
BEGUN = Begun(0, 1, "m", "", [MessageItem("user", "Hi")], {}, parser="hermes", servers=[CALC])
PAINTER = PaintTool("painter", "image", "12x8")
USAGE = Usage(10, 3, 4)


def begun_steps() -> st.SearchStrategy[Begun]:
    approved = ApprovedCall("mcpr_1", "calc", "add", "{}", schema_digest(ADD))
    return st.builds(
        lambda servers, functions, painter, changes, asks: replace(
            BEGUN,
            servers=servers,
            functions=functions,
            painter=painter,
            asks=asks and not (servers or changes["approved"] or changes["background"]),
            **changes,
        ),
        st.sampled_from([[], [CALC], [CALC, ServerUse("other")]]),
        st.sampled_from([[], [FUNCTION]]),
        st.sampled_from([None, PAINTER]),
        st.fixed_dictionaries(
            {
                "max_tool_calls": st.integers(0, 3),
                "max_turns": st.integers(1, 4),
                "background": st.booleans(),
                "max_output_tokens": st.sampled_from([None, 1, 7]),
                "choice": st.sampled_from([Choice(), Choice("required"), Choice("none")]),
                "approved": st.sampled_from([[], [approved], [replace(approved, name="gone")]]),
            }
        ),
        st.booleans(),
    )


def paints_alone() -> st.SearchStrategy[Begun]:
    """A response of a model that writes no text."""
    begun = replace(BEGUN, servers=[], painter=replace(PAINTER, prompt="a star"))
    return st.builds(
        lambda most, background: replace(begun, max_tool_calls=most, background=background),
        st.integers(0, 1),
        st.booleans(),
    )


@st.composite
def logs(draw: st.DrawFn) -> list[Step]:
    """A log that agents have written, who may have died at any moment."""
    steps: list[Step] = [draw(st.one_of(begun_steps(), begun_steps(), paints_alone()))]
    for _ in range(40):
        state = state_of(ID, steps)
        added = draw(carried_out(state))
        if added is None:
            break
        steps.append(replace(added, index=len(steps)))
        if draw(st.integers(0, 30)) == 0 and not isinstance(steps[-1], Ended):
            steps.append(Ended(len(steps), "cancelled", 2))
    return steps


def call_of(name: str) -> FunctionCall:
    return FunctionCall(name, '{"prompt": "a star"}' if name == PAINT else "{}")


def others_sent(state: ResponseState) -> list[Sending]:
    """Steps of calls that are about to be made."""
    actions = [_next_of_call(state, call) for call in state.calls.values() if call.is_pending]
    calls = [
        (action.call, action.attempt) for action in actions if isinstance(action, plan.CallTool)
    ]
    return [
        Sending(0, call.turn, call.number, attempt, "k", "d", "b", call.paints)
        for call, attempt in calls
        if not (call.paints and call.sendings)
    ]


def after_call(action: plan.CallTool, flag: bool) -> Step:
    call = action.call
    if call.paints and call.sendings:
        return Result(
            0, call.turn, call.number, "result" if flag else "failed", "A" if flag else None
        )
    may_repeat = flag or call.paints
    return Sending(0, call.turn, call.number, action.attempt, "k", "d", "b", may_repeat)


def carried_out(state: ResponseState) -> st.SearchStrategy[Step | None]:
    """Return the steps that an agent may append when it carries out the next action, or dies."""
    match next_action(state):
        case plan.ListTools(label):
            return st.sampled_from(
                [
                    Listed(0, label, [ADD, BOOK]),
                    Listed(0, label, [BOOK]),
                    Listed(0, label, error="x"),
                ]
            )
        case plan.AskModel(turn, withdrawn):
            return st.just(Asked(0, turn, withdrawn=withdrawn))
        case plan.ReadAnswer(turn):
            names = [tool.function.name for tool in state.tools().callable]
            if state.turns[turn].withdrawn:
                names = []
            calls = st.lists(st.sampled_from(names), max_size=3) if names else st.just([])
            return st.builds(
                lambda text, called, reason: Answered(
                    0, turn, text, [*map(call_of, called)], USAGE, reason
                ),
                st.sampled_from(["", "So."]),
                calls,
                st.sampled_from(["stop", "stop", "length"]),
            )
        case plan.CallTools(calls):
            return st.builds(after_call, st.sampled_from(calls), st.booleans())
        case plan.SettleUnknown(call):
            # Or the agent lives, and makes several calls at the same time.
            settled = st.booleans().map(
                lambda fails: Result(
                    0, call.turn, call.number, "failed" if fails else "result", "done"
                )
            )
            unknown = st.booleans().map(
                lambda ask: Result(0, call.turn, call.number, "unknown", ask=ask)
            )
            return st.one_of(unknown, settled, *map(st.just, others_sent(state)))
        case plan.RefuseCall(call, _):
            return st.just(Result(0, call.turn, call.number, "failed"))
        case plan.Conclude(status):
            return st.just(Ended(0, status, 2))
        case plan.Nothing():
            return st.none()
