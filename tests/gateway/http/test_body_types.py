"""Refusals of bodies name what is allowed, and unknown fields may be ignored."""

import json
from typing import Any

import msgspec
import pytest

from shared.errors import RequestError
from shared.protocol.items import MessageItem
from workers.gateway.http.body_types import converted, decoded, without_unknown
from workers.gateway.http.errors import UnknownParameter, validation_error
from workers.gateway.openai.chat import plan_chat
from workers.gateway.openai.responses import input_of
from workers.gateway.schemas.openai_request import UNSUPPORTED, ChatRequest
from workers.gateway.schemas.transcription import TranscriptionForm

HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(HI | fields, ChatRequest)
    return validation_error(refused.value, UNSUPPORTED, ChatRequest)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
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


def test_unknown_fields_have_no_effect_in_any_body_that_ignores_them() -> None:
    body = HI | {"logit_bias": {"5": 1}, "new": 1}
    read = decoded(json.dumps(body).encode(), ChatRequest, UNSUPPORTED, ignores_unknown=True)
    assert read == msgspec.convert(HI | {"logit_bias": {5: 1}}, ChatRequest)
    form = {"model": "m", "temperature": "0.5", "new": "1"}
    assert converted(form, TranscriptionForm, ignores_unknown=True, strict=False).temperature == 0.5
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "new": 1}], "new": 1}
    assert [type(each) for each in input_of([item], "r", ignores_unknown=True)] == [MessageItem]
    for way in (
        lambda: converted(form, TranscriptionForm, strict=False),
        lambda: input_of([item], "r"),
    ):
        with pytest.raises(UnknownParameter, match="new: unknown field"):
            way()


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
