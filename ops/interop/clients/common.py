"""The part that the programs of all Python clients share. It needs the standard library alone."""

import json
import sys
from collections.abc import Callable
from typing import Any

CASES: dict[str, Any] = json.load(sys.stdin)
"""Questions and files, written by the runner."""


def report(**checks: Callable[[], Any]) -> None:
    """Print the result of each check as one JSON object. A failed check has a text."""
    results = {}
    for name, check in checks.items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    json.dump(results, sys.stdout)


def failure_of(call: Callable[..., Any], **fields: Any) -> str:
    """Return the class and the status of the exception that a call raises."""
    try:
        call(**fields)
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'status_code', '')}".strip()
    return "no exception"


def call_tool(create: Callable[..., Any]) -> list[Any]:
    """Return the arguments of a call, and the answer to its result, of an API in OpenAI's form."""
    messages, tools = CASES["messages"], [{"type": "function", "function": CASES["tool"]}]
    first = create(messages=messages, tools=tools, tool_choice="required").choices[0].message
    [call] = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": CASES["tool_result"]}
    after = create(messages=[*messages, first, result], tools=tools)
    return [json.loads(call.function.arguments), after.choices[0].message.content]


def write_object(create: Callable[..., Any]) -> Any:
    """Return the answer that follows the schema, of an API in OpenAI's form."""
    schema = {"name": "shape", "schema": CASES["schema"], "strict": True}
    style = {"type": "json_schema", "json_schema": schema}
    answer = create(messages=CASES["messages"], response_format=style)
    return json.loads(answer.choices[0].message.content)
