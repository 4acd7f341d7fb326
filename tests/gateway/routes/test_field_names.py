"""Errors name the field that the client has sent, also where the bus has another name for it."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from shared.errors import InvalidRequest
from shared.protocol.records import ErrorInfo, named_error
from tests.gateway.conftest import Gateway, Start
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.http.errors import RequestFailed
from workers.gateway.openai.chat_assembler import CHAT
from workers.gateway.openai.completions import COMPLETION
from workers.gateway.vllm.generate_assembler import GENERATE

CONTEXT = 1024
HI = [{"role": "user", "content": "Hi"}]


def error_at(field: str | None, message: str = "no") -> ErrorInfo:
    return ErrorInfo("invalid_request", message, field, "client", retryable=False)


@pytest.mark.parametrize(
    ("kind", "own", "field", "client_field"),
    [
        (COMPLETION, {}, "messages", "prompt"),
        (COMPLETION, {}, "messages[0].content", "prompt"),
        (COMPLETION, {}, "prompt_token_ids[3]", "prompt"),
        (COMPLETION, {}, "sampling_params.prompt_logprobs", "logprobs"),
        (COMPLETION, {}, "sampling_params.min_tokens", "min_tokens"),
        (COMPLETION, {}, "messages_of_mine", "messages_of_mine"),
        (CHAT, {}, "messages[1].role", "messages[1].role"),
        (CHAT, {}, "items", "messages"),
        (CHAT, {}, "template_kwargs.x", "chat_template_kwargs.x"),
        (CHAT, {}, "sampling_params", None),
        (CHAT, {"sampling_params.max_tokens": "m"}, "sampling_params.max_tokens", "m"),
        (CHAT, {"sampling_params.stop": "s.t"}, "sampling_params.stop[2]", "s.t"),
        (GENERATE, {}, "messages", "token_ids"),
        (GENERATE, {}, "sampling_params.stop[2]", "sampling_params.stop[2]"),
        (CHAT, {}, None, None),
    ],
)
def test_a_field_has_the_name_that_the_client_sent(
    kind: AnswerKind[Any], own: dict[str, str], field: str | None, client_field: str | None
) -> None:
    assert kind.client_fields.renamed(own).translate(error_at(field)).field == client_field


def test_the_message_begins_with_the_clients_field() -> None:
    field = "sampling_params.stop[1]"
    assert (
        CHAT.client_fields.translate(error_at(field, f"{field}: too long")).message
        == "stop[1]: too long"
    )
    whole = CHAT.client_fields.translate(error_at("sampling_params", "sampling_params: too many"))
    assert whole.message == "too many"
    odd = error_at("messages", "messages are odd")
    assert COMPLETION.client_fields.translate(odd).message == odd.message


def test_reported_errors_are_translated_and_no_others() -> None:
    with pytest.raises(RequestFailed) as caught, COMPLETION.client_fields.translated():
        raise named_error(error_at("messages"))
    assert caught.value.info.field == "prompt"
    with pytest.raises(InvalidRequest) as own, COMPLETION.client_fields.translated():
        raise InvalidRequest("no", field="messages")
    assert own.value.field == "messages"


def test_errors_of_a_checked_message_are_translated() -> None:
    with pytest.raises(RequestFailed) as caught, COMPLETION.client_fields.translated(checks=True):
        raise InvalidRequest("no", field="messages")
    assert caught.value.info.field == "prompt"


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": ["", ""]}, "prompt"),
    ("completions", {"prompt": [100_000]}, "prompt"),
    ("completions", {"prompt": "<|image_pad|>"}, "prompt"),
    ("completions", {"prompt": "a " * CONTEXT}, "prompt"),
    ("completions", {"prompt": "a " * 100 * CONTEXT}, "prompt"),
    ("completions", {"prompt": [5] * CONTEXT}, "prompt"),
    ("completions", {"prompt": "a", "max_tokens": 2 * CONTEXT}, "max_tokens"),
    ("completions", {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ("completions", {"prompt": "a", "guided_regex": "("}, "guided_regex"),
    ("completions", {"prompt": "a", "logit_bias": {"100000": 1}}, "logit_bias"),
    ("completions", {"prompt": "a " * 100 * CONTEXT, "echo": True, "logprobs": 1}, "prompt"),
    ("completions", {"prompt": [100_000], "echo": True}, "prompt"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": HI, "max_completion_tokens": 5000}, "max_completion_tokens"),
    ("chat/completions", {"messages": HI, "max_tokens": 5000}, "max_tokens"),
    (
        "chat/completions",
        {"messages": HI, "structured_outputs": {"grammar": "start: x"}},
        "structured_outputs.grammar",
    ),
    ("chat/completions", {"messages": HI, "guided_json": {"type": 1}}, "guided_json"),
    (
        "chat/completions",
        {
            "messages": HI,
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "none"}}}
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        "chat/completions",
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "none"}},
            },
        },
        "response_format",
    ),
    ("chat/completions", {"messages": HI, "chat_template_kwargs": {"messages": 1}}, None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_name_only_fields_that_the_client_sent(
    gateway: Gateway, *, stream: bool
) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:

        async def refuse(path: str, body: dict[str, Any]) -> str | None:
            body = {"model": "demo", "stream": stream} | body
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post(f"/{path}", body=body, cast_to=object)
            assert "sampling_params" not in caught.value.message, body
            return caught.value.param

        params = await asyncio.gather(*(refuse(path, body) for path, body, _ in REFUSED))
    expected = [param or "chat_template_kwargs.messages" for _, _, param in REFUSED]
    assert params == expected


async def test_errors_of_generate_name_only_its_fields(http: httpx.AsyncClient) -> None:
    for path, body, expected in REFUSED:
        if body.get("echo") or expected in (None, "tools", "response_format", "min_tokens"):
            continue
        answer = await http.post(f"/v1/{path}/render", json={"model": "demo"} | body)
        if answer.status_code != 200:  # Only engines check grammars and some others.
            param = answer.json()["error"]["param"]
            assert param.removeprefix("body.") == expected, (answer.text, body)
    full = {"token_ids": [5] * CONTEXT, "sampling_params": {}}
    answer = await http.post("/inference/v1/generate", json=full)
    assert answer.json()["error"]["param"] == "token_ids"


async def test_unknown_fields_may_be_ignored(another: Start) -> None:
    gateway = another(unknown_fields="ignore")
    body = {"model": "demo", "messages": HI, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        path = "/v1/chat/completions"
        assert (await http.post(path, json=body | {"new_field": {"a": 1}})).status_code == 200
        refused = await http.post(path, json=body | {"new_field": 1, "web_search_options": {}})
        new = {"new_field": {"a": 1}}
        part = {"type": "input_text", "text": "Hi"} | new
        item = {"role": "user", "content": [part]} | new
        block = {"type": "text", "text": "Hi"} | new
        message = {"role": "user", "content": [block]} | new
        for path, sent in (
            ("/v1/responses/input_tokens", {"model": "demo", "input": [item]} | new),
            ("/v1/messages/count_tokens", {"model": "demo", "messages": [message]} | new),
            ("/tokenize", {"model": "demo", "prompt": "Hi"} | new),
        ):
            answer = await http.post(path, json=sent)
            assert answer.status_code == 200, answer.text
        form = {"purpose": "vision", "new_field": "1"}
        answer = await http.post("/v1/files", data=form, files={"file": b"GIF89a"})
        assert answer.status_code == 200, answer.text
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "web_search_options")
