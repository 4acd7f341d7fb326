"""Requests to the model, one for each turn of a response. Pure."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from shared.protocol.requests import GenerateRequest
from shared.protocol.steps import Asked
from shared.responses.conversation import Entry, messages_of
from shared.responses.state import ResponseState
from shared.responses.tools import ToolTable
from shared.tool_calls.grammars import calls_schema, required_grammar, strict_grammar
from shared.tool_calls.turn_text import TurnText

REQUIRED = "required"
"""The form of an answer that is a list of calls, see `shared.tool_calls.parser.Form`."""


class TurnFormat(Struct, frozen=True):
    """Format of an answer: the syntax of its tool calls, and the grammar that enforces it."""

    form: str | None = None
    """None: the turn has no calls."""
    names: list[str] = []
    one_call: bool = False
    structure: dict[str, Any] | None = None
    """StructuredOutputs mapping that constrains the answer."""

    def new_text(self) -> TurnText:
        return TurnText(self.form, self.names, one_call=self.one_call)


def turn_format(state: ResponseState, turn: Asked, table: ToolTable) -> TurnFormat:
    """Return the format of a turn that has no answer yet."""
    begun, callable_tools = state.begun, table.callable
    assert begun is not None
    if turn.withdrawn or table.mode == "none" or not callable_tools:
        return TurnFormat()
    names = [tool.function.name for tool in callable_tools]
    if table.mode == "required" and begun.parser is not None and begun.call_signs is not None:
        grammar = required_grammar(callable_tools, begun.call_signs, one_call=begun.one_call)
        return TurnFormat(begun.parser, names, begun.one_call, {"grammar": grammar})
    if table.mode == "required":
        schema = calls_schema(callable_tools, one_call=begun.one_call)
        return TurnFormat(REQUIRED, names, begun.one_call, {"json_schema": schema})
    if begun.parser is None:
        return TurnFormat()
    structure = None
    is_strict = any(tool.function.strict for tool in callable_tools)
    if begun.call_signs is not None and (is_strict or table.is_restricted):
        structure = {"grammar": strict_grammar(callable_tools, begun.call_signs)}
    return TurnFormat(begun.parser, names, begun.one_call, structure)


def turn_request(
    state: ResponseState, turn: Asked, context: Sequence[Entry]
) -> tuple[GenerateRequest, dict[str, Any], TurnFormat]:
    """Return the request of a turn, its sampling parameters and its format.

    `context` is the whole conversation, with the items of this response.
    """
    begun, table = state.begun, state.tools()
    assert begun is not None
    syntax = turn_format(state, turn, table)
    sampling = dict(begun.sampling)
    if syntax.structure is not None:
        sampling["structured_outputs"] = syntax.structure
    if syntax.form not in (None, REQUIRED):
        # The tags that mark calls may be special tokens.
        sampling["skip_special_tokens"] = False
    if begun.max_output_tokens is not None:
        used = state.usage.completion_tokens
        sampling["max_tokens"] = max(1, begun.max_output_tokens - used)
    shows_tools = begun.shows_tools and table.mode != "none" and not turn.withdrawn
    root = begun.ancestors[0] if begun.ancestors else state.response_id
    request = GenerateRequest(
        model=begun.model,
        messages=messages_of(
            begun.instructions, context[turn.num_dropped :], takes_tools=begun.shows_tools
        ),
        tools=[tool.tool for tool in table.tools.values()] if shows_tools else [],
        lane=begun.lane,
        prompt_cache_key=begun.prompt_cache_key or root,
    )
    return request, sampling, syntax


def oldest_group(context: Sequence[Entry]) -> int:
    """Return the number of the oldest items, up to the next message of the user.

    They are dropped together, so that a call never loses its output.
    """
    position = 1
    while position < len(context):
        item = context[position].item
        if getattr(item, "role", None) == "user":
            break
        position += 1
    return position
