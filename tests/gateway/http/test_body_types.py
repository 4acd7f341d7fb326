"""Refusals of bodies name what is allowed, and unknown fields may be ignored."""

from typing import Any

import msgspec
import pytest

from shared.errors import RequestError
from workers.gateway.http.body_types import without_unknown
from workers.gateway.http.errors import validation_error
from workers.gateway.openai.chat import plan_chat
from workers.gateway.schemas.openai_request import UNSUPPORTED, ChatRequest

HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(HI | fields, ChatRequest)
    return validation_error(refused.value, UNSUPPORTED, ChatRequest)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"max_token": 5}, "max_token", "max_token: unknown field; did you mean max_tokens?"),
        ({"zzz": 5}, "zzz", "zzz: unknown field"),
        (
            {"messages": [{"role": "usr", "content": "Hi"}]},
            "messages[0].role",
            "messages[0].role: 'usr' is not one of the possible values: assistant, developer,"
            " system, tool, user; did you mean user?",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "txt", "text": "Hi"}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type: 'txt' is not one of the possible values: text, refusal,"
            " image_url, input_audio, audio_url, video_url, file; did you mean text?",
        ),
        (
            {"temperature": "hot"},
            "temperature",
            "temperature: must be a number or null, not a text",
        ),
    ],
)
def test_a_refusal_names_the_allowed_and_the_nearest(
    fields: dict[str, Any], field: str, words: str
) -> None:
    error = refusal(**fields)
    assert (error.field, error.message.partition(" (")[0]) == (field, words)


def test_unknown_fields_are_left_out_at_every_depth() -> None:
    part = {"type": "text", "text": "Hi", "new": [1]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"new": 1}, "new": 2}}
    body: dict[str, Any] = HI | {
        "messages": [{"role": "user", "content": [part], "new": {}}],
        "tools": [tool],
        "new": None,
        "prediction": {},
    }
    pruned = without_unknown(body, ChatRequest, UNSUPPORTED)
    assert pruned == HI | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"new": 1}}}],
        "prediction": {},
    }


def test_fields_of_other_servers_in_repeated_messages_have_no_effect() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": "A", "reasoning_content": "r", "reasoning": "r"}
    part = {"type": "text", "text": "Hi"}
    tool = {"type": "function", "function": {"name": "f"}}
    plain: dict[str, Any] = HI | {
        "messages": [{"role": "assistant", "content": "A"}],
        "tools": [tool],
    }
    marked: dict[str, Any] = plain | {"messages": [answer | mark], "tools": [tool | mark]}
    plain["messages"].append({"role": "user", "content": [part]})
    marked["messages"].append({"role": "user", "content": [part | mark]} | mark)
    plans = [
        plan_chat(msgspec.convert(body | {"tool_choice": "required"}, ChatRequest))
        for body in (plain, marked)
    ]
    assert plans[0] == plans[1]
