"""Grammar for `strict` functions that a model may choose not to call. Pure.

Text is free up to the opening tag of a call. The call must then be of a function that was offered,
with arguments that match its schema.

This is sound for the `hermes` format only, whose tag means nothing else. In `llama3_json` the tag
is the opening brace, with which an answer in JSON begins too; what follows the tag of `mistral`
differs between its versions.
"""

import json
from collections.abc import Sequence
from typing import Any

from shared.errors import InvalidRequest
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import Tool
from workers.gateway.core.plan import structure_of
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.openai_request import ChatRequest

# The spacing that models were trained to write. It also prevents endless space.
_SPACING = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
}
_GRAMMAR = r"""
start: call* TEXT
call: begin "\n"? (FUNCTIONS) "\n"? END
TEXT: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/
"""
# llguidance does not match a special token as text, even if the token stands for text.
_BEGIN = r"begin[lazy]: /(.|\n)*<tool_call>/"
_BEGIN_TOKEN = "begin: TEXT <[{}]>"


def strict_structure(request: ChatRequest, card: ModelCard) -> dict[str, Any] | None:
    """Return the constraint on an answer if one of the functions is strict, else None.

    Raises a RequestError if the calls cannot be constrained.
    """
    tools = request.tools or []
    strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
    if strict is None:
        return None
    if card.call_signs is None:
        raise UnsupportedParameter(
            f"{request.model} writes calls in a format that cannot be constrained while calls are"
            " optional: leave strict out, or set tool_choice to 'required' or to a function",
            field=f"tools[{strict}].function.strict",
        )
    if (other := structure_of(request)) is not None:
        raise InvalidRequest(f"{other[0]} cannot be combined with strict functions", field=other[0])
    return {"grammar": strict_grammar(tools, card.call_signs)}


def strict_grammar(tools: Sequence[Tool], call_signs: Sequence[int | None]) -> str:
    """Return the grammar of a whole answer, in llguidance's variant of Lark.

    `call_signs` are those of the ModelCard. A function that is not strict takes any object.
    """
    begin, end = call_signs
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
    """Return the schema of a call. Definitions move to its top, where `$ref` finds them."""
    arguments = dict(tool.function.parameters or {}) if tool.function.strict else {}
    definitions = arguments.pop("$defs", None)
    schema = call_schema(tool, "arguments", {"type": "object"} | arguments)
    return schema | _SPACING | ({"$defs": definitions} if definitions else {})


def call_schema(tool: Tool, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, with its arguments under `key`."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }
