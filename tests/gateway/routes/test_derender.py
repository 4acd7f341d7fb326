"""Derender, tokenize and detokenize through a real gateway, with the demo model."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway.routes.test_generate import GENERATE, RENDER, chat, events, ok, refused

DERENDER = "/v1/chat/completions/derender"
RECORDED = Path(__file__).parent / "recorded" / "derender.json"
TOOL = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}


async def tokens_of(http: httpx.AsyncClient, text: str) -> list[int]:
    asked = {"model": "demo", "prompt": text, "add_special_tokens": False}
    token_ids: list[int] = (await ok(http, "/tokenize", asked))["tokens"]
    return token_ids


def answered(token_ids: list[int], reason: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": reason, "token_ids": token_ids}
    return {"request_id": "generate-tokens-x", "choices": [choice]}


async def event_by_event(
    http: httpx.AsyncClient, path: str, chunks: list[Any], **asked: Any
) -> list[Any]:
    state, told = None, []
    for chunk in chunks:
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state} | asked
        answer = await ok(http, path, body)
        # The state is JSON between two calls.
        state = msgspec.json.decode(msgspec.json.encode(answer["stream_state"]))
        told.append(answer["chunk"])
    return told


async def test_the_answer_has_the_recorded_fields(http: httpx.AsyncClient) -> None:
    recorded = msgspec.json.decode(RECORDED.read_bytes())
    asked = recorded["request"] | {"model": "demo", "prompt_token_ids": [5, 6]}
    asked["generate_response"]["choices"][0]["token_ids"] = [5, 6, 7]
    answer, right = await ok(http, DERENDER, asked), recorded["response"]
    assert list(answer) == list(right)
    assert list(answer["choices"][0]) == list(right["choices"][0])
    assert list(answer["choices"][0]["message"]) == list(right["choices"][0]["message"])
    assert list(answer["usage"]) == list(right["usage"])
    assert answer["id"] == right["id"]


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_a_stream_derenders_to_the_text_of_the_whole(
    http: httpx.AsyncClient, logprobs: int | None
) -> None:
    rendered = await ok(http, RENDER, chat("red.png"))
    sampling = rendered["sampling_params"] | {"logprobs": logprobs}
    asked = rendered | {"sampling_params": sampling}
    whole = await ok(http, GENERATE, asked)
    prompt = {"model": "demo", "prompt_token_ids": rendered["token_ids"]}
    right = await ok(http, DERENDER, prompt | {"generate_response": whole})
    options = {"include_usage": True}
    stream = await http.post(GENERATE, json=asked | {"stream": True, "stream_options": options})
    chunks = [chunk for _, chunk in events(stream.text)[:-1]]
    *told, last = await event_by_event(http, DERENDER, chunks, **prompt)
    deltas = [event["choices"][0]["delta"] for event in told]
    (choice,) = right["choices"]
    assert "".join(delta["content"] or "" for delta in deltas) == choice["message"]["content"]
    assert [delta["role"] for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert told[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert last["usage"]["completion_tokens"] == len(whole["choices"][0]["token_ids"])
    if logprobs is not None:
        parts = [event["choices"][0]["logprobs"]["content"] for event in told]
        assert [one for part in parts for one in part] == choice["logprobs"]["content"]


async def test_characters_of_several_tokens_come_whole(http: httpx.AsyncClient) -> None:
    text = "Grüße, 世界 🌍!"
    token_ids = await tokens_of(http, text)
    chunks = [answered([token_id]) for token_id in token_ids]
    for chunk in chunks[:-1]:
        chunk["choices"][0]["finish_reason"] = None
    path = "/v1/completions/derender"
    told = await event_by_event(http, path, chunks, model="demo")
    texts = [event["choices"][0]["text"] for event in told]
    assert "".join(texts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in texts)
    assert len(token_ids) > len(text)  # otherwise no character has several tokens


async def test_control_tokens_are_skipped_by_default(http: httpx.AsyncClient) -> None:
    rendered = await ok(http, RENDER, chat())
    asked = {"model": "demo", "generate_response": answered(rendered["token_ids"])}
    plain = await ok(http, DERENDER, asked)
    assert "<|im_start|>" not in plain["choices"][0]["message"]["content"]
    shown = asked | {"chat_request": {"skip_special_tokens": False}}
    control = await ok(http, DERENDER, shown)
    assert "<|im_start|>" in control["choices"][0]["message"]["content"]


async def test_tool_calls_are_found_in_text(http: httpx.AsyncClient) -> None:
    token_ids = await tokens_of(http, '[{"name": "paint", "parameters": {"color": "red"}}]')
    request = {"tools": [TOOL], "tool_choice": "required"}
    asked = {"model": "demo", "generate_response": answered(token_ids), "chat_request": request}
    (choice,) = (await ok(http, DERENDER, asked))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "paint", "arguments": '{"color": "red"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    chunks = [answered([token_id]) for token_id in token_ids]
    for chunk in chunks[:-1]:
        chunk["choices"][0]["finish_reason"] = None
    told = await event_by_event(http, DERENDER, chunks, model="demo", chat_request=request)
    deltas = [delta for e in told for delta in e["choices"][0]["delta"].get("tool_calls") or []]
    assert [d["id"] for d in deltas if "id" in d] == [call["id"]]
    assert "".join(d["function"]["arguments"] for d in deltas) == '{"color": "red"}'
    assert told[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_an_invalid_derender_body_is_refused(http: httpx.AsyncClient) -> None:
    two = answered([5]) | {"choices": 2 * answered([5])["choices"]}
    event = {"stream": True, "model": "demo", "generate_chunk": answered([5])}
    cases: list[dict[str, Any]] = [
        {"generate_response": answered([])},
        {"generate_response": answered([5] * 2000)},
        {"generate_response": answered([10**9])},
        {"generate_response": answered([5]) | {"output_mode": "text"}},
        {"generate_response": answered([5]), "prompt_token_ids": [5] * 2000},
        {"generate_response": answered([5]), "surprise": 1},
        event | {"generate_chunk": two},
        event | {"stream_state": {"token_ids": [5] * 1000}},
        event | {"stream_state": {"token_ids": [5], "num_out": -1}},
        event | {"stream": "yes"},
        event | {"stream_state": {"text": "x" * (2**18 + 1)}},
        {"generate_response": answered([5]) | {"choices": 9 * answered([5])["choices"]}},
    ]
    for case in cases:
        status, error = await refused(http, DERENDER, {"model": "demo"} | case)
        assert status == 400, error
    for responses in ([], 65 * [answered([5])]):
        body = {"generate_responses": responses}
        assert (await refused(http, "/v1/completions/derender", body))[0] == 400


async def test_detokenize_inverts_tokenize(http: httpx.AsyncClient) -> None:
    asked = {"model": "demo", "prompt": "What color?", "return_token_strs": True}
    told = await ok(http, "/tokenize", asked)
    assert list(told) == ["count", "max_model_len", "tokens", "token_strs"]
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    back = await ok(http, "/detokenize", {"model": "demo", "tokens": told["tokens"]})
    assert back == {"prompt": "What color?"}
    without = await ok(http, "/tokenize", {"prompt": "What color?"})
    assert without == told | {"token_strs": None}


async def test_messages_are_tokenized_as_they_are_rendered(http: httpx.AsyncClient) -> None:
    asked = chat("red.png")
    rendered = await ok(http, RENDER, asked)
    messages = {"model": "demo", "messages": asked["messages"]}
    assert (await ok(http, "/tokenize", messages))["tokens"] == rendered["token_ids"]
    fewer = await ok(http, "/tokenize", messages | {"add_generation_prompt": False})
    assert fewer["tokens"] == rendered["token_ids"][: fewer["count"]]
    assert fewer["count"] < len(rendered["token_ids"])


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/tokenize", {}, "invalid_request"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "invalid_request"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "invalid_request"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "unsupported_parameter"),
        ("/tokenize", {"prompt": "a", "new": 1}, "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "model": "zzz"}, "unknown_model"),
        ("/detokenize", {"tokens": [-1]}, "invalid_request"),
        ("/detokenize", {"tokens": [10**9]}, "invalid_request"),
    ],
)
async def test_an_invalid_tokenize_body_is_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], code: str
) -> None:
    status, error = await refused(http, path, {"model": "demo"} | body)
    assert (status, error["code"]) == (404 if code == "unknown_model" else 400, code)
