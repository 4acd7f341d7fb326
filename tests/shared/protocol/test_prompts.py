"""Validation of the prompt of a request."""

from typing import Any

import msgspec
import pytest

from shared.errors import InvalidRequest
from shared.protocol.prompts import prompt_of, prompt_to_tokenize
from shared.protocol.renderer_rpc import TokenizeRequest
from shared.protocol.requests import GenerateRequest, Prompt

USER = {"role": "user", "content": "a"}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"function": {"name": "f"}}
FEATURE = {"modality": "image", "mm_hash": "h", "offset": 0, "length": 1}


def request(**fields: Any) -> GenerateRequest:
    return msgspec.convert({"model": "m"} | fields, GenerateRequest)


def test_each_form_of_prompt_is_accepted() -> None:
    assert prompt_of(request(messages=[USER])).messages[0].content == "a"
    assert prompt_of(request(prompt="")).text == ""
    prompt = prompt_of(request(prompt_token_ids=[1], features=[FEATURE]))
    assert (prompt.token_ids, len(prompt.features)) == ([1], 1)
    calling = {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "12", "tool_call_id": "c"}
    assert len(prompt_of(request(messages=[USER, calling, result], tools=[TOOL])).messages) == 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "messages"),
        ({"messages": [USER], "prompt": "a"}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"messages": [USER], "features": [FEATURE]}, "features"),
        ({"prompt": "a", "features": [FEATURE]}, "features"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt_token_ids": [1], "template_kwargs": {"a": 1}}, "template_kwargs"),
        ({"prompt_token_ids": [1], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [USER | {"tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [USER], "template_kwargs": {"a": 2**64}}, "template_kwargs"),
        (
            {
                "messages": [USER],
                "tools": [{"function": {"name": "f", "parameters": {"a": 2**64}}}],
            },
            "tools[0].function.parameters",
        ),
        ({"messages": [USER], "template_kwargs": {"a": [-(2**63) - 1]}}, "template_kwargs"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_of(request(**fields))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [True]},
        {"features": [FEATURE | {"length": 0}]},
        {"features": [FEATURE | {"offset": -1}]},
        {"features": [FEATURE | {"mm_hash": ""}]},
        {"features": [FEATURE | {"mm_hash": "h" * 129}]},
        {"features": [FEATURE | {"modality": "smell"}]},
        {"features": [FEATURE | {"data": "https://example.com/"}]},
        {"features": [FEATURE | {"data": "media:" + "A" * 64}]},
        {"tools": [{"function": {"name": "not a name"}}]},
        {"tools": [{"function": {"name": ""}}]},
        {"tools": [{"function": {"name": "f" * 65}}]},
        {"cache_salt": ""},
        {"cache_salt": "s" * 129},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        request(**fields)


def test_a_prompt_to_tokenize_keeps_its_template_options() -> None:
    call = msgspec.convert({"messages": [USER], "add_generation_prompt": False}, TokenizeRequest)
    assert prompt_to_tokenize(call).template_kwargs == {"add_generation_prompt": False}
    assert prompt_to_tokenize(TokenizeRequest(prompt="a")) == Prompt(text="a")
    with pytest.raises(InvalidRequest):
        prompt_to_tokenize(TokenizeRequest())
