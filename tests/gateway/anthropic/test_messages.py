"""Messages of Anthropic's API: plans of requests, and answers as the official client reads them.

Requests are like those of agents for programming, in particular Claude Code.
"""

import json
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as ClientMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shared.errors import InvalidRequest
from shared.protocol.encoding import to_json
from shared.protocol.records import AnyRecord, ChoiceDelta, ErrorInfo, Finish, TokenChunk, Usage
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import (
    ContentPart,
    DocumentPart,
    DocumentURL,
    FunctionCall,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
    ToolCall,
)
from workers.gateway.anthropic.assembler import MESSAGE, MessageAssembler
from workers.gateway.anthropic.errors import body_of, status_of
from workers.gateway.anthropic.messages import plan_messages
from workers.gateway.core.assembler import Answering
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.errors import RequestFailed
from workers.gateway.openai.chat import ChatOptions
from workers.gateway.schemas.messages import MessagesRequest

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CARD = ModelCard("m", 1000, 300, True, True, "hermes", call_signs=[5, 6])
CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} | CACHED for name in ("Bash", "Read")]
TEXTS = [
    "Hello.",
    '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>',
    'Both:\n<tool_call>{"name": "Read", "arguments": {"n": 1e9}}</tool_call>\n'
    '<tool_call>{"name": "Bash", "arguments": {}}</tool_call> Then.',
]
CUT = 'So. <tool_call>{"name": "Bash", "arguments": {"n": 1, "command": "l'


def planned(content: Any, **fields: Any) -> SubmitPlan[ChatOptions]:
    """Return the plan for a message of the user, or for several messages in `fields`."""
    messages = [{"role": "user", "content": content}]
    body = {"model": "m", "max_tokens": 9, "messages": messages} | fields
    return plan_messages(msgspec.convert(body, MessagesRequest), CARD)


def assembled(texts: list[str], reason: Any, stop: str | None = None) -> tuple[list[Any], Any]:
    """Return the events and the whole answer, for the texts of all records."""
    options = ChatOptions(form="hermes", names=["Bash", "Read"], prompt_tokens=7)
    last = len(texts) - 1
    records: list[AnyRecord] = [
        TokenChunk(
            i,
            1,
            [
                ChoiceDelta(
                    0, i, [i], text, reason if i == last else None, stop if i == last else None
                )
            ],
        )
        for i, text in enumerate(texts)
    ]
    records.append(Finish(last + 1, 1, Usage(7, len(texts), 4), 1, []))
    assembler = MessageAssembler(Answering("msg-1", "m", 5, options))
    events = [event for record in records for event in assembler.add(0, record)]
    return events, assembler.answer()


@given(st.sampled_from([*TEXTS, CUT]), st.lists(st.integers(0, 200), max_size=4))
def test_the_clients_accumulator_makes_the_whole_answer_of_any_stream(
    text: str, cuts: list[int]
) -> None:
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    reason = "length" if text == CUT else "stop"
    events, answer = assembled(pieces, reason)
    snapshot, buffers = None, {}  # type: ignore[var-annotated]
    for event in events:
        encoded = to_json(event)
        assert MESSAGE.event_name(event) == json.loads(encoded)["type"]
        snapshot = accumulate_event(
            event=EVENT.validate_json(encoded), current_snapshot=snapshot, json_bufs=buffers
        )
    assert snapshot is not None
    whole = ClientMessage.model_validate_json(to_json(answer))
    ignored = {"parsed_output"}
    streamed = [block.model_dump(exclude=ignored) for block in snapshot.content]
    if text == CUT:  # The client completes the arguments that the model began.
        assert streamed[-1].pop("input") == {"n": 1}
        streamed[-1]["input"] = {}
    assert streamed == [block.model_dump(exclude=ignored) for block in whole.content]
    assert (snapshot.stop_reason, snapshot.usage) == (whole.stop_reason, whole.usage)


def test_blocks_follow_one_another_and_the_end_has_its_reason() -> None:
    events, answer = assembled([TEXTS[2]], "stop")
    kinds = [MESSAGE.event_name(event).removeprefix("content_block_") for event in events]
    block = ["start", "delta", "stop"]
    assert kinds == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert [block["type"] for block in json.loads(to_json(answer.content))] == [
        "text",
        "tool_use",
        "tool_use",
        "text",
    ]
    assert events[0].message.usage.input_tokens == 7
    assert msgspec.to_builtins(answer.usage) == {
        "input_tokens": 3,
        "output_tokens": 1,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
    }
    reasons = [
        (answer.stop_reason, answer.stop_sequence)
        for _, answer in (
            assembled([TEXTS[2]], "stop"),
            assembled(["Hello."], "stop"),
            assembled(["Hello."], "stop", "END"),
            assembled(["Hello."], "length"),
        )
    ]
    assert reasons == [
        ("tool_use", None),
        ("end_turn", None),
        ("stop_sequence", "END"),
        ("max_tokens", None),
    ]


def test_an_agents_conversation_becomes_messages() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "List."} | CACHED]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "c2ln"},
                {"type": "text", "text": "Well:"},
                call,
                call | {"id": "toolu_2", "name": "Read"},
            ],
        },
        {
            "role": "user",
            "content": [
                result
                | {"content": [{"type": "text", "text": "a"}, {"type": "image", "source": PNG}]},
                result | {"tool_use_id": "toolu_2", "content": "none", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "user", "content": "Now."},
        {"role": "system", "content": "It is late."},
    ]
    plan = planned(
        "",
        messages=conversation,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "You write programs."} | CACHED,
        ],
        tools=TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        metadata={"user_id": "u"},
    )
    arguments = FunctionCall("Bash", '{"command":"ls"}')
    calls = [
        ToolCall("toolu_1", arguments),
        ToolCall("toolu_2", msgspec.structs.replace(arguments, name="Read")),
    ]
    image = ImagePart(ImageURL("data:;base64,AAAA"))
    failed: list[ContentPart] = [TextPart("The tool has failed."), TextPart("none")]
    assert plan.requests[0].messages == [
        Message("system", "You write programs."),
        Message("user", "List."),
        Message("assistant", "Well:", calls),
        Message("tool", [TextPart("a"), image], tool_call_id="toolu_1"),
        Message("tool", failed, tool_call_id="toolu_2"),
        Message("user", [TextPart("Go on."), TextPart("Now.")]),
        Message("system", "It is late."),
    ]
    assert plan.options.form == "hermes"
    assert plan.options.one_call is True
    named = MESSAGE.fields_of(plan.options)
    assert named.name_of("messages[3].content[1].image_url.url") == (
        "messages[2].content[0].content[1].source"
    )
    assert named.name_of("messages[1].content") == "messages"


def test_a_prompt_after_a_line_of_billing_is_kept() -> None:
    system = "x-anthropic-billing-header: cch=1;\nBe brief."
    assert planned("Hi", system=system).requests[0].messages == [
        Message("system", system),
        Message("user", "Hi"),
    ]


def test_documents_and_results_of_searches_become_parts() -> None:
    source = {"type": "content", "content": [{"type": "text", "text": "two"}]}
    document = {"type": "document", "title": "A book"}
    file = "file-" + "0" * 64
    blocks = [
        document | {"source": PNG | {"media_type": "application/pdf"}},
        {"type": "document", "source": {"type": "file", "file_id": file}},
        {"type": "document", "source": {"type": "text", "data": "one"}},
        {"type": "document", "source": source},
        {"type": "search_result", "title": "T", "source": "http://x", "content": []},
        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
    ]
    (message,) = planned(blocks).requests[0].messages or []
    assert message.content == [
        TextPart("A book"),
        DocumentPart(DocumentURL("data:;base64,AAAA")),
        DocumentPart(DocumentURL(f"media:{file}")),
        TextPart("one"),
        TextPart("two"),
        TextPart("T\nhttp://x"),
        ImagePart(ImageURL("http://x/y.png")),
    ]


def test_an_answer_continues_the_last_message_of_the_assistant() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    assert planned("", messages=turns).requests[0].template_kwargs == {
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert planned("Hi").requests[0].template_kwargs == {}


def test_choices_of_tools_and_formats_constrain_the_answer() -> None:
    named = planned("Hi", tools=TOOLS, tool_choice={"type": "tool", "name": "Read"})
    assert (named.options.form, named.options.names) == ("named", ["Read"])
    anything = planned("Hi", tools=TOOLS, tool_choice={"type": "any"})
    assert "grammar" in anything.sampling["structured_outputs"]
    assert planned("Hi", tools=TOOLS, tool_choice={"type": "none"}).requests[0].tools == []
    form = {"type": "json_schema", "schema": {"type": "object"}}
    plan = planned("Hi", output_config={"format": form}, stop_sequences=["END"], temperature=0.5)
    assert plan.sampling["structured_outputs"] == {"json_schema": {"type": "object"}}
    assert (plan.sampling["stop"], plan.sampling["temperature"]) == (["END"], 0.5)
    fields = MESSAGE.fields_of(plan.options)
    assert fields.name_of("sampling_params.structured_outputs") == "output_config.format"


def test_errors_have_the_types_and_statuses_of_anthropics_api() -> None:
    forms = {
        code: (status_of(info), body_of(info).error.type)
        for code in ("invalid_media", "unknown_model", "body_too_large", "overloaded", "x")
        for info in [ErrorInfo(code, "no", None, "server" if code == "x" else "client", False)]
    }
    assert forms == {
        "invalid_media": (400, "invalid_request_error"),
        "unknown_model": (404, "not_found_error"),
        "body_too_large": (413, "request_too_large"),
        "overloaded": (529, "overloaded_error"),
        "x": (500, "api_error"),
    }


@pytest.mark.parametrize(
    ("content", "fields", "field"),
    [
        ([{"type": "tool_use", "id": "1", "name": "x", "input": {}}], {}, "messages[0].content[0]"),
        ([{"type": "thinking", "thinking": "Hm"}], {}, "messages"),
        ("Hi", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ("Hi", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_a_request_without_sense_is_refused_by_its_field(
    content: Any, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises((InvalidRequest, RequestFailed)) as refused:
        planned(content, **fields)
    assert refused.value.field == field
