"""The first step of a response: which requests are accepted, and what is made of their fields."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shared.config.schema import AgentConfig
from shared.errors import RequestError
from shared.protocol.items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputImagePart,
    InputTextPart,
    Item,
    MessageItem,
    response_of_item,
)
from shared.protocol.records import ErrorInfo, TokenLogprobs, Usage
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.steps import Answered, ApprovedCall, Asked, Begun, Choice, Ended, Step, ToolRef
from shared.responses.state import state_of
from workers.gateway.openai.response_object import error_of, response_of
from workers.gateway.openai.responses import (
    LOGPROBS,
    MAX_ITEMS,
    ConversationBefore,
    asks_at_once,
    begun_of,
    input_of,
    needs_card,
)
from workers.gateway.schemas.responses import ResponseRequest

CARD = ModelCard("m", 1024, 300, False, True, "hermes", [7, 8])
CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "c",
    "name": "add",
    "arguments": "{}",
}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}


FILE = f"file-{'a' * 64}"


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


def begun_from(
    changes: dict[str, Any],
    before: ConversationBefore | None = None,
    card: ModelCard | None = CARD,
    config: AgentConfig | None = None,
) -> Begun:
    """The first step of the response to a request with these fields."""
    request = msgspec.convert({"model": "m", "input": "Hi"} | changes, ResponseRequest)
    items = input_of(request.input, "resp_1")
    before = before or ConversationBefore()
    return begun_of(request, "alice", 5, items, before, card, config or AgentConfig())


# -- input -----------------------------------------------------------------------------------------


def test_text_is_a_message_of_the_user_with_a_repeatable_id() -> None:
    (message,) = input_of("Hi", "resp_1")
    assert isinstance(message, MessageItem)
    assert (message.role, message.content) == ("user", "Hi")
    assert message.id is not None
    assert message.id.startswith("msg_")
    assert input_of("Hi", "resp_1") == [message]
    (other,) = input_of("Hi", "resp_2")
    assert other.id != message.id


def test_items_keep_their_ids_and_get_the_missing_ones() -> None:
    image = {"type": "input_image", "image_url": "https://a.example/b.png"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "See:"}, image]},
        CALL | {"id": "fc_mine"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    message, call, output = input_of(items, "resp_1")
    assert response_of_item(message.id or "") == "resp_1"
    assert isinstance(message, MessageItem)
    assert message.content == [
        InputTextPart("See:"),
        InputImagePart("https://a.example/b.png"),
    ]
    assert isinstance(call, FunctionCallItem)
    assert (call.id, call.name) == ("fc_mine", "add")
    assert isinstance(output, FunctionOutputItem)
    assert output.id is not None
    assert output.id.startswith("fco_")
    assert message.id != input_of([items[1], items[0]], "resp_1")[1].id


@pytest.mark.parametrize(
    ("value", "code", "field"),
    [
        (None, "invalid_request", "input"),
        ([], "invalid_request", "input"),
        ({"role": "user"}, "invalid_request", "input"),
        (["Hi"], "invalid_request", "input[0]"),
        ([CALL, {"type": "web_search_call"}], "unsupported_parameter", "input[1].type"),
        ([{"type": "nonsense"}], "invalid_request", "input[0].type"),
        ([{"role": "user"}], "invalid_request", "input[0].content"),
        ([{"role": "nobody", "content": ""}], "invalid_request", "input[0].role"),
        ([{"role": "user", "content": "", "y": 1}], "unknown_parameter", "input[0].y"),
        ([CALL | {"name": ""}], "invalid_request", "input[0].name"),
        (
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "invalid_request",
            "input[0].content[0]",
        ),
        (
            [
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image"}],
                }
            ],
            "invalid_request",
            "input[0].output[0]",
        ),
        (
            [said({"type": "input_image", "image_url": "https://a.example/b", "file_id": FILE})],
            "invalid_request",
            "input[0].content[0]",
        ),
        ([said({"type": "input_file"})], "invalid_request", "input[0].content[0]"),
        (
            [said({"type": "input_file", "file_id": "file-1"})],
            "invalid_request",
            "input[0].content[0].file_id",
        ),
        (
            [said({"type": "input_file", "file_id": FILE, "file_url": "https://a.example/b"})],
            "invalid_request",
            "input[0].content[0]",
        ),
        (
            [said({"type": "input_file", "file_data": "AA==", "pages": "1-"})],
            "invalid_request",
            "input[0].content[0].pages",
        ),
        ([said({"type": "input_audio"})], "invalid_request", "input[0].content[0].input_audio"),
        ([{"type": "reasoning", "summary": []}], "unsupported_parameter", "input[0].type"),
    ],
)
def test_an_input_is_refused_by_its_field(value: Any, code: str, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        input_of(value, "resp_1")
    assert (refused.value.code, refused.value.field) == (code, field)


def test_the_number_of_items_is_limited() -> None:
    message = {"role": "user", "content": "x"}
    assert len({item.id for item in input_of([message] * MAX_ITEMS, "resp_1")}) == MAX_ITEMS
    with pytest.raises(RequestError, match=f"1 to {MAX_ITEMS} items"):
        input_of([message] * (MAX_ITEMS + 1), "resp_1")


# -- the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ({}, True),
        ({"tools": [ADD]}, True),
        ({"store": False}, True),
        ({"tools": [{"type": "mcp", "server_label": "calc"}]}, False),
        ({"background": True}, False),
        ({"truncation": "auto"}, False),
    ],
)
def test_the_model_is_asked_at_once_if_nothing_comes_before(
    changes: dict[str, Any], asks: bool
) -> None:
    config = msgspec.convert({"servers": {"calc": {"url": "https://a.example/mcp"}}}, AgentConfig)
    begun = begun_from(changes, config=config)
    assert asks_at_once(begun) is asks
    approved = ApprovedCall("mcpr_1", "calc", "add", "{}", "d")
    assert not asks_at_once(replace(begun, approved=[approved]))


def test_a_plain_request_has_the_defaults() -> None:
    begun = begun_from({}, card=None)
    assert (begun.index, begun.created_s, begun.model, begun.tenant) == (0, 5, "m", "alice")
    assert begun.sampling == {}
    assert (begun.store, begun.background, begun.truncate) == (True, False, False)
    assert (begun.choice, begun.functions, begun.servers) == (Choice(), [], [])
    assert (begun.parser, begun.call_signs, begun.shows_tools) == (None, None, True)
    assert (begun.max_tool_calls, begun.max_turns) == (32, 33)
    assert not begun.one_call
    assert not begun.logprobs
    # Fields that were not given are shown by their defaults in the response object.
    assert begun.echo["text"] == {"format": {"type": "text"}}
    assert begun.echo["tools"] == []
    assert begun.echo["temperature"] is None
    assert "tool_choice" not in begun.echo


def test_fields_become_limits_sampling_and_echo() -> None:
    fields = {
        "instructions": "Be brief.",
        "temperature": 0.0,
        "top_p": 0.5,
        "max_output_tokens": 9,
        "store": False,
        "truncation": "auto",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "include": [LOGPROBS],
        "top_logprobs": 2,
        "user": "u",
    }
    begun = begun_from(fields)
    assert begun.sampling == {"temperature": 0.0, "top_p": 0.5, "logprobs": 2}
    assert (begun.instructions, begun.prompt_cache_key) == ("Be brief.", "k")
    assert (begun.max_output_tokens, begun.store) == (9, False)
    assert (begun.truncate, begun.logprobs) == (True, True)
    for name in fields.keys() - {"include", "store"}:
        assert begun.echo[name] == fields[name]
    assert begun_from({"include": [LOGPROBS]}).sampling == {"logprobs": 0}


@pytest.mark.parametrize("tier", [None, "auto", "default", "flex"])
def test_a_flexible_response_is_computed_in_the_batch_lane(tier: str | None) -> None:
    begun = begun_from({"service_tier": tier})
    assert begun.lane == ("batch" if tier == "flex" else "interactive")
    assert begun.echo.get("service_tier", "default") == ("flex" if tier == "flex" else "default")


def test_a_request_lowers_the_limit_on_calls_and_does_not_raise_it() -> None:
    config = AgentConfig(max_tool_calls=4, max_turns=3)
    limits = [
        begun_from({"max_tool_calls": limit}, config=config).max_tool_calls
        for limit in (None, 0, 2, 9)
    ]
    assert limits == [4, 0, 2, 4]
    begun = begun_from({"max_tool_calls": 9}, config=config)
    assert (begun.max_turns, begun.echo["max_tool_calls"]) == (3, 9)


@pytest.mark.parametrize(
    ("form", "structure"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "name": "n", "schema": {"enum": [1]}},
            {"json_schema": {"enum": [1]}},
        ),
    ],
)
def test_a_format_constrains_the_answer(
    form: dict[str, Any], structure: dict[str, Any] | None
) -> None:
    begun = begun_from({"text": {"format": form}})
    assert begun.sampling.get("structured_outputs") == structure
    assert form.items() <= begun.echo["text"]["format"].items()


def test_what_came_before_is_continued() -> None:
    approved = ApprovedCall("mcpr_1", "calc", "add", "{}", "digest")
    before = ConversationBefore(["resp_a", "resp_b"], [MessageItem("user", "x")], [approved])
    begun = begun_from({"previous_response_id": "resp_b"}, before)
    assert begun.ancestors == ["resp_a", "resp_b"]
    assert begun.approved == [approved]
    # The items of earlier responses stay with these.
    assert [item.content for item in begun.input if isinstance(item, MessageItem)] == ["Hi"]
    assert begun.echo["previous_response_id"] == "resp_b"


def test_the_card_is_needed_for_tools_and_for_calls_in_the_conversation() -> None:
    plain = msgspec.convert({"model": "m"}, ResponseRequest)
    with_tools = msgspec.convert({"model": "m", "tools": [ADD]}, ResponseRequest)
    messages: list[Item] = [MessageItem("user", "Hi")]
    assert not needs_card(plain, messages)
    assert needs_card(with_tools, messages)
    assert needs_card(plain, [*messages, FunctionCallItem("c", "add", "{}")])


def test_tools_are_planned_by_the_card_and_shown_as_they_were_given() -> None:
    begun = begun_from({"tools": [ADD], "tool_choice": "auto"})
    (tool,) = begun.functions
    assert (tool.function.name, tool.function.parameters) == ("add", {"type": "object"})
    assert (begun.parser, begun.call_signs) == ("hermes", [7, 8])
    assert begun.echo["tools"] == [ADD | {"strict": None}]
    assert begun.echo["tool_choice"] == "auto"
    assert not begun.one_call


@pytest.mark.parametrize(
    ("changes", "choice", "one_call"),
    [
        ({"tool_choice": "required"}, Choice("required"), False),
        ({"tool_choice": "none"}, Choice("none"), False),
        ({"parallel_tool_calls": False}, Choice(), True),
        (
            {"tool_choice": {"type": "function", "name": "add"}},
            Choice("required", [ToolRef("add")]),
            True,
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "add"}],
                }
            },
            Choice("auto", [ToolRef("add")]),
            False,
        ),
    ],
)
def test_a_named_tool_is_called_once(
    changes: dict[str, Any], choice: Choice, one_call: bool
) -> None:
    begun = begun_from({"tools": [ADD]} | changes)
    assert (begun.choice, begun.one_call) == (choice, one_call)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"background": True, "store": False}, "invalid_request", "background"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        (
            {"tools": [ADD], "text": {"format": {"type": "json_object"}}},
            "unsupported_parameter",
            "text.format",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    changes: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        begun_from(changes)
    assert (refused.value.code, refused.value.field) == (code, field)


def test_tools_that_may_not_be_called_need_no_model_that_calls() -> None:
    form = {"format": {"type": "json_object"}}
    begun = begun_from({"tools": [ADD], "tool_choice": "none", "text": form}, card=None)
    assert begun.sampling == {"structured_outputs": {"json_object": True}}


# -- the response object ---------------------------------------------------------------------------


def test_the_response_shows_the_plan_and_its_log_probabilities() -> None:
    begun = begun_from({"background": True, "include": [LOGPROBS], "temperature": 0.5})
    queued = response_of(state_of("resp_1", [begun]), {})
    assert (queued.status, queued.usage, queued.output) == ("queued", None, [])
    assert (queued.temperature, queued.background, queued.tool_choice) == (0.5, True, "auto")
    logprobs = [TokenLogprobs(-0.5, 1, [3, 4], [-0.5, -1.0])]
    answered = Answered(2, 0, "a", [], Usage(6, 1, 4), token_ids=[3], logprobs=logprobs)
    steps: list[Step] = [begun, Asked(1, 0), answered, Ended(3, "completed", 9)]
    response = msgspec.to_builtins(response_of(state_of("resp_1", steps), {3: b"a", 4: b"b"}))
    assert (response["status"], response["completed_at"]) == ("completed", 9)
    (part,) = response["output"][0]["content"]
    (entry,) = part["logprobs"]
    assert (part["text"], entry["token"], entry["logprob"]) == ("a", "a", -0.5)
    assert [top["token"] for top in entry["top_logprobs"]] == ["a", "b"]
    assert response["usage"]["total_tokens"] == 7
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4


@pytest.mark.parametrize(
    ("code", "fault", "client_code"),
    [
        ("overloaded", "server", "rate_limit_exceeded"),
        ("invalid_media", "client", "invalid_image"),
        ("invalid_grammar", "client", "invalid_prompt"),
        ("worker_failure", "server", "server_error"),
    ],
)
def test_errors_have_codes_that_clients_know(code: str, fault: Any, client_code: str) -> None:
    error = error_of(ErrorInfo(code, "details", None, fault, False))
    assert error.code == client_code
    # An internal error does not say what went wrong inside.
    assert ("details" in error.message) == (fault == "client")
    assert error.message.endswith(f"({code})")
