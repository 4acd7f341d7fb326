"""Schemas and grammars that restrict the calls in an answer to the offered functions. Pure.

The grammar permits any text up to the opening tag of a call. Then it requires the name of an
offered function, and arguments that match its schema if the function is strict.

This is correct only for the `hermes` format, because its tag has no other meaning. In `llama3_json`
the tag is the opening brace, and an answer in JSON begins with it too. The text after the tag of
`mistral` differs between its versions.
"""

import json
from collections.abc import Sequence
from typing import Any

from shared.helpers.closed_schemas import closed
from shared.protocol.requests import Tool

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""Option of llguidance. Without it, a model that is forced to write JSON against its tendency could
write spaces forever."""

# The spacing of the models' training data. It also prevents endless spaces.
_SPACING = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
}
_CALL = r"""
call: begin "\n"? (FUNCTIONS) "\n"? END
"""
_OPTIONAL = r"""
start: call* TEXT
TEXT: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/
"""
# llguidance does not match a special token as text, even if the token stands for text.
_BEGIN = r"begin[lazy]: /(.|\n)*<tool_call>/"
_BEGIN_TOKEN = "begin: {}"


def strict_grammar(tools: Sequence[Tool], call_signs: Sequence[int | None]) -> str:
    """Return the grammar of a whole answer, in llguidance's variant of Lark.

    `call_signs` are as in ModelCard. A function that is not strict accepts any object.
    """
    begin, end = call_signs
    opening = _BEGIN if begin is None else _BEGIN_TOKEN.format(f"TEXT <[{begin}]>")
    schemas = [_call_schema(tool, is_strict=bool(tool.function.strict)) for tool in tools]
    return _OPTIONAL + _calls_grammar(opening, end, schemas)


def required_grammar(
    tools: Sequence[Tool], call_signs: Sequence[int | None], *, one_call: bool
) -> str:
    """Return the grammar of an answer that consists of calls with arguments of their schemas."""
    begin, end = call_signs
    opening = _BEGIN_TOKEN.format('"<tool_call>"' if begin is None else f"<[{begin}]>")
    start = "start: call" if one_call else r'start: call ("\n"? call)*'
    schemas = [_call_schema(tool, is_strict=True) for tool in tools]
    return start + _calls_grammar(opening, end, schemas)


def _calls_grammar(opening: str, end: int | None, schemas: Sequence[dict[str, Any]]) -> str:
    names = " | ".join(f"f_{i}" for i in range(len(schemas)))
    ending = '"</tool_call>"' if end is None else f"<[{end}]>"
    return "\n".join(
        [
            _CALL.replace("FUNCTIONS", names).replace("END", ending),
            opening,
            *(f"f_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(schemas)),
        ]
    )


def _call_schema(tool: Tool, *, is_strict: bool) -> dict[str, Any]:
    arguments = arguments_schema(tool, "/properties/arguments") if is_strict else {}
    return call_schema(tool, "arguments", {"type": "object"} | arguments) | _SPACING


def call_schema(tool: Tool, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, with its arguments under `key`."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def arguments_schema(tool: Tool, place: str = "") -> dict[str, Any]:
    """Return the schema of the arguments, with closed objects, for a place in another schema.

    Raises InvalidRequest for a strict function with an object that cannot be closed.
    """
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    field = f"the parameters of {tool.function.name}"
    strict = bool(tool.function.strict)
    return closed(schema, "tools", f"tools: {field}", strict=strict, place=place)


def calls_schema(tools: Sequence[Tool], *, one_call: bool) -> dict[str, Any]:
    """Return the schema of a list of calls."""
    calls = [
        call_schema(
            tool,
            "parameters",
            arguments_schema(tool, f"/items/anyOf/{i}/properties/parameters"),
        )
        for i, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if one_call:
        schema["maxItems"] = 1
    return schema | COMPACT
