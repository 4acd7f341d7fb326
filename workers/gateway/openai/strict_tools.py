"""`strict` functions that a model may call or not: text runs free up to the sign of a call, and the
call is of a function that was offered, with arguments of its schema. Pure.

That is sound for one form. Of `hermes` the sign says nothing else. Of `llama3_json` it is the brace
that an answer begins with, as one that is JSON itself does; after that of `mistral` another thing
follows in every version.
"""

import json
from collections.abc import Sequence
from typing import Any

from shared.errors import InvalidRequest
from shared.protocol.messages import Tool
from shared.protocol.renderer_rpc import ModelCard
from workers.gateway.core.plan import structure_of
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.openai_request import ChatRequest

# As models have been taught to write it, and no endless space.
_SPACING = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
    }
}
_GRAMMAR = r"""
start: call* TEXT
call: begin "\n"? (FUNCTIONS) "\n"? END
TEXT: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/
"""
# To llguidance a token of its own is no text, even where it stands for some.
_BEGIN = r"begin[lazy]: /(.|\n)*<tool_call>/"
_BEGIN_TOKEN = "begin: TEXT <[{}]>"


def strict_structure(request: ChatRequest, card: ModelCard) -> dict[str, Any] | None:
    """What holds the calls of an answer to their functions, where one of these is strict and none
    must be called. Raises a RequestError where nothing can."""
    tools = request.tools or []
    strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
    if strict is None:
        return None
    if card.call_signs is None:
        raise UnsupportedParameter(
            f"{request.model} writes calls in a form that is not held to schemas while it may also"
            " not call: leave strict out, or give tool_choice 'required' or a function",
            field=f"tools[{strict}].function.strict",
        )
    if (other := structure_of(request)) is not None:
        raise InvalidRequest(
            f"{other[0]}: an answer with strict functions has their structure", field=other[0]
        )
    return {"grammar": strict_grammar(tools, card.call_signs)}


def strict_grammar(tools: Sequence[Tool], signs: Sequence[int | None]) -> str:
    """Of a whole answer, in llguidance's form of Lark; `signs` are a ModelCard's. A function that
    is not strict has any object for arguments."""
    begin, end = signs
    names = " | ".join(f"f_{i}" for i in range(len(tools)))
    ending = '"</tool_call>"' if end is None else f"<[{end}]>"
    return "\n".join(
        [
            _GRAMMAR.replace("FUNCTIONS", names).replace("END", ending),
            _BEGIN if begin is None else _BEGIN_TOKEN.format(begin),
            *(f"f_{i}: %json {json.dumps(_call_schema(tool))}" for i, tool in enumerate(tools)),
        ]
    )


def _call_schema(tool: Tool) -> dict[str, Any]:
    """Schemas that the function defines for itself stay within reach of `$ref`."""
    arguments = dict(tool.function.parameters or {}) if tool.function.strict else {}
    definitions = arguments.pop("$defs", None)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": {"type": "object"} | arguments,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return schema | _SPACING | ({"$defs": definitions} if definitions else {})
