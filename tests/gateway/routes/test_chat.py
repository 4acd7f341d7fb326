"""Chat completions and completions as JSON; test_openai_client.py uses the official client."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]
STAR = ROOT / "ops" / "demo_images" / "yellow_star.jpg"


def star_url(padding: int = 0) -> str:
    """Return a data URL. Padding after the end of a JPEG has no effect."""
    data = STAR.read_bytes() + bytes(padding)
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def question(text: str = "What colour is it?", url: str | None = None) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": url or star_url()}},
        {"type": "text", "text": text},
    ]
    return {"model": "demo", "messages": [{"role": "user", "content": parts}]}


def events(text: str) -> list[tuple[str, Any]]:
    """Return the ids and decoded data of events. `[DONE]` stays a string."""
    pairs = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line[0] != ":")
        if lines:
            data = lines["data"]
            pairs.append((lines.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return pairs


async def test_an_answer_to_an_image(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=question())
    assert answer.status_code == 200, answer.text
    body = answer.json()
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert "yellow" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert body["id"] == answer.headers["x-request-id"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers


async def test_a_stream_has_the_same_answer_in_pieces(http: httpx.AsyncClient) -> None:
    body = question() | {"n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 12}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/chat/completions", json=streamed)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, (last_id, done) = events(answer.text)
    assert (last_id, done) == ("", "[DONE]")
    ids = [int(event_id) for event_id, _ in chunks]
    assert ids == sorted(set(ids))
    assert chunks[-1][1]["choices"] == []
    assert chunks[-1][1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1][1]["usage"]["prompt_tokens_details"]
    }
    assert all(chunk["usage"] is None for _, chunk in chunks[:-1])
    for index in (0, 1):
        own = [c for _, chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == whole["choices"][index]["message"]["content"]
        assert own[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]


async def test_log_probabilities_come_with_text_and_bytes(http: httpx.AsyncClient) -> None:
    body = question() | {"logprobs": True, "top_logprobs": 2}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    text = b"".join(bytes(token["bytes"]) for token in content).decode()
    assert choice["message"]["content"] in text
    for token in content:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["token"] == token["token"]


async def test_a_large_image_is_stored_outside_the_request(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=question(url=star_url(9 * 2**20)))
    assert answer.status_code == 200, answer.text
    assert "yellow" in answer.json()["choices"][0]["message"]["content"]


async def test_given_parameters_override_the_configured_defaults(http: httpx.AsyncClient) -> None:
    # The model is configured to be greedy; 1.0 is the default of SamplingParams.
    body = {"model": "demo", "prompt": "a", "n": 8, "seed": 1, "max_tokens": 16}
    greedy = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert len({choice["text"] for choice in greedy}) == 1
    sampled = body | {"temperature": 1.0}
    choices = (await http.post("/v1/completions", json=sampled)).json()["choices"]
    assert len({choice["text"] for choice in choices}) > 1


async def test_usage_with_every_chunk(http: httpx.AsyncClient) -> None:
    body = question() | {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    *chunks, _ = events((await http.post("/v1/chat/completions", json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for _, chunk in chunks]
    assert counts == sorted(counts)
    assert len({chunk["usage"]["prompt_tokens"] for _, chunk in chunks}) == 1


async def test_completions_of_several_prompts(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": ["What", "Which"], "max_tokens": 4, "n": 2, "echo": True}
    whole = (await http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"].partition(" ")[0][:5] for c in whole["choices"]][::2][0].startswith("What")
    streamed = await http.post("/v1/completions", json=body | {"stream": True})
    *chunks, (_, done) = events(streamed.text)
    assert done == "[DONE]"
    for index in range(4):
        own = [c["text"] for _, chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(own) == whole["choices"][index]["text"]


async def test_an_echo_has_log_probabilities(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": "What colour", "max_tokens": 1, "echo": True, "logprobs": 1}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("What colour")
    assert logprobs["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"][:-1], strict=True):
        assert choice["text"][offset:].startswith(token)


async def test_an_answer_may_be_the_echo_alone(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": ["What colour", "Red"],
        "echo": True,
        "logprobs": 1,
    }
    more = (await http.post("/v1/completions", json=body | {"max_tokens": 1})).json()
    alone = (await http.post("/v1/completions", json=body | {"max_tokens": 0})).json()
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["prompt_tokens"] == more["usage"]["prompt_tokens"]
    streamed = await http.post("/v1/completions", json=body | {"max_tokens": 0, "stream": True})
    *chunks, _ = events(streamed.text)
    for prompt, echo, longer in zip(body["prompt"], alone["choices"], more["choices"], strict=True):
        assert (echo["text"], echo["finish_reason"]) == (prompt, "length")
        for name, values in echo["logprobs"].items():
            assert values == longer["logprobs"][name][:-1]
        own = [c for _, chunk in chunks for c in chunk["choices"] if c["index"] == echo["index"]]
        assert "".join(c["text"] for c in own) == prompt
        assert own[-1]["finish_reason"] == "length"
    named = {"x-request-id": f"echo-{time.time_ns()}"}
    for max_tokens, status in ((0, 200), (1, 422), (0, 200)):
        limited = body | {"max_tokens": max_tokens}
        got = await http.post("/v1/completions", json=limited, headers=named)
        assert got.status_code == status
    refused = await http.post("/v1/completions", json=body | {"max_tokens": 0, "echo": False})
    assert refused.json()["error"]["param"] == "max_tokens"
