"""The `anthropic` package of Python."""

import json
from typing import Any

import anthropic

from ops.interop.clients.common import CASES, failure_of, report

_, DATA = CASES["image"].split(",")
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
CONTENT = [{"type": "image", "source": SOURCE}, {"type": "text", "text": CASES["question"]}]
MESSAGES: Any = [{"role": "user", "content": CONTENT}]
ASK: dict[str, Any] = {"model": "demo", "max_tokens": 64, "messages": MESSAGES}
LONG: dict[str, Any] = ASK | {"model": "endless", "max_tokens": 3000}
TOOL = {name: CASES["tool"][name] for name in ("name", "description")}
TOOLS: Any = [TOOL | {"input_schema": CASES["tool"]["parameters"]}]
SCHEMA = {"type": "json_schema", "schema": CASES["schema"]}
client = anthropic.Anthropic(max_retries=0)
create = client.messages.create


def text_of(**fields: Any) -> Any:
    return create(**ASK | fields).content[0].text


def stream() -> Any:
    with client.messages.stream(**ASK) as events:
        return "".join(events.text_stream)


def tools() -> Any:
    first = create(**ASK, tools=TOOLS, tool_choice={"type": "any"})
    [call] = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": CASES["tool_result"]}
    turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return [call.input, text_of(messages=[*MESSAGES, *turns], tools=TOOLS)]


def streamed_tools() -> Any:
    with client.messages.stream(**ASK, tools=TOOLS, tool_choice={"type": "any"}) as events:
        [call] = events.get_final_message().content
    assert call.type == "tool_use"
    return call.input


def cancel() -> None:
    with create(**LONG, stream=True, extra_headers=CASES["cancel"]) as events:
        next(iter(events))


report(
    chat=text_of,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    structured=lambda: json.loads(text_of(output_config={"format": SCHEMA})),
    tokens=lambda: client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens,
    failures=lambda: [failure_of(text_of, model="other"), failure_of(text_of, max_tokens=-1)],
    timeout=lambda: failure_of(create, **LONG, timeout=0.5, extra_headers=CASES["timeout"]),
    cancel=cancel,
)
