"""Render and generate through a real gateway, with the demo model."""

import hashlib
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway.conftest import Start
from tests.support.media import data_url

IMAGES = Path(__file__).parents[3] / "ops" / "demo_images"
GENERATE, RENDER = "/inference/v1/generate", "/v1/chat/completions/render"


def chat(image: str | None = None, **changed: Any) -> dict[str, Any]:
    parts: list[Any] = [{"type": "text", "text": "What color is this image?"}]
    if image is not None:
        url = data_url((IMAGES / image).read_bytes())
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": parts}]
    return {"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0} | changed


async def ok(http: httpx.AsyncClient, path: str, body: Any, **headers: str) -> Any:
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(http: httpx.AsyncClient, path: str, body: Any) -> tuple[int, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code >= 400, answer.text
    return answer.status_code, answer.json()["error"]


def events(text: str) -> list[tuple[str, Any]]:
    """Return ids and data. Each event has one line of each."""
    pairs = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        pairs.append((lines.get("id", ""), data if data == "[DONE]" else msgspec.json.decode(data)))
    return pairs


def token_ids(generated: Any) -> list[int]:
    ids: list[int] = generated["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("image", [None, "red.png"])
async def test_generate_answers_a_rendered_chat_as_the_chat_endpoint_does(
    http: httpx.AsyncClient, image: str | None
) -> None:
    body = chat(image)
    answer = await ok(http, "/v1/chat/completions", body)
    rendered = await ok(http, RENDER, body)
    assert (rendered["features"] is None) == (image is None)
    generated = await ok(http, GENERATE, rendered)
    choice = answer["choices"][0]
    assert generated["choices"][0]["finish_reason"] == choice["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == generated["usage"][name]
    text = await ok(http, GENERATE, rendered | {"output_mode": "text"})
    assert text["choices"][0]["text"] == choice["message"]["content"]
    assert token_ids(text) == token_ids(generated)


async def test_the_answer_has_the_protocols_fields_in_its_order(http: httpx.AsyncClient) -> None:
    rendered = await ok(http, RENDER, chat("red.png"))
    assert list(rendered) == [
        "request_id", "token_ids", "token_offsets", "features", "content_parts",
        "sampling_params", "model", "reasoning_ended", "reasoning_parser_kwargs",
        "return_token_ids", "output_mode", "stream", "stream_options", "cache_salt", "priority",
        "kv_transfer_params", "ec_transfer_params",
    ]  # fmt: skip
    body = rendered | {"return_token_ids": True}
    generated = await ok(http, GENERATE, body)
    assert generated["request_id"] == f"generate-tokens-{rendered['request_id']}"
    assert generated["prompt_token_ids"] == rendered["token_ids"]
    assert generated["mm_placeholders"] == rendered["features"]["mm_placeholders"]
    (choice,) = generated["choices"]
    num_tokens = len(choice["token_ids"])
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": num_tokens}]


async def test_an_image_sent_before_is_found_by_its_hash(
    http: httpx.AsyncClient,
) -> None:
    rendered = await ok(http, RENDER, chat("triangle_left.png"))
    first = await ok(http, GENERATE, rendered)
    for data in ({"image": [None]}, None):
        features = rendered["features"] | {"kwargs_data": data, "mm_metadata": None}
        again = await ok(http, GENERATE, rendered | {"features": features})
        assert token_ids(again) == token_ids(first)
    without = await ok(http, RENDER, chat("triangle_left.png", mm_payload="none"))
    assert without["features"] == rendered["features"] | {"kwargs_data": None, "mm_metadata": None}
    assert token_ids(await ok(http, GENERATE, without)) == token_ids(first)


async def test_an_unknown_hash_is_a_cache_miss_and_the_connection_lives(
    http: httpx.AsyncClient,
) -> None:
    rendered = await ok(http, RENDER, chat("red.png", mm_payload="none"))
    features = rendered["features"] | {"mm_hashes": {"image": ["0" * 64]}}
    for stream in (False, True):
        body = rendered | {"features": features, "stream": stream}
        status, error = await refused(http, GENERATE, body)
        assert (status, error["code"]) == (422, "mm_cache_miss")
        assert error["param"] == "features.kwargs_data.image[0]"
    async with httpx.AsyncClient(
        base_url=http.base_url, limits=httpx.Limits(max_connections=1), trust_env=False, timeout=60
    ) as client:
        streams = []
        for _ in range(2):
            answer = await client.post(GENERATE, json=rendered | {"features": features})
            assert answer.status_code == 422
            streams.append(answer.extensions["network_stream"].get_extra_info("client_addr"))
        assert streams[0] == streams[1]


async def test_images_may_come_unprocessed(http: httpx.AsyncClient) -> None:
    body = chat("five_hearts.png")
    rendered = await ok(http, RENDER, body)
    (place,) = rendered["features"]["mm_placeholders"]["image"]
    start, end = place["offset"], place["offset"] + place["length"]
    short = rendered["token_ids"][: start + 1] + rendered["token_ids"][end:]
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    raw = rendered | {
        "token_ids": short,
        "features": None,
        "content_parts": [{"type": "image_url", "url": url}],
        "return_token_ids": True,
    }
    answer = await ok(http, GENERATE, raw)
    assert answer["prompt_token_ids"] == rendered["token_ids"]
    assert answer["mm_placeholders"] == {"image": [place]}
    assert token_ids(answer) == token_ids(await ok(http, GENERATE, rendered))
    undecodable = {"url": f"data:image/png;base64,{'!' * 300_000}"}
    for parts in (
        2 * raw["content_parts"],
        [{"type": "image_url"}],
        [{"type": "audio_url"}],
        [{"type": "image_url", "image_url": undecodable}],
    ):
        status, error = await refused(http, GENERATE, raw | {"content_parts": parts})
        assert (status, error["param"][:18]) == (400, "body.content_parts")


async def test_a_stream_adds_up_to_the_answer(http: httpx.AsyncClient) -> None:
    rendered = await ok(http, RENDER, chat("red.png"))
    sampling = rendered["sampling_params"] | {"logprobs": 2}
    body = rendered | {"sampling_params": sampling, "return_token_ids": True}
    whole = await ok(http, GENERATE, body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await http.post(GENERATE, json=body | {"stream": True, "stream_options": options})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *pairs, (usage_id, usage), (_, done) = events(answer.text)
    assert done == "[DONE]"
    assert "prompt_token_ids" in pairs[0][1]
    assert all("prompt_token_ids" not in event for _, event in pairs[1:])
    ids, contents = [], []
    for _, event in pairs:
        (choice,) = event["choices"]
        ids += choice["token_ids"]
        contents += choice["logprobs"]["content"]
        assert event["usage"]["completion_tokens"] == len(ids)
    assert ids == token_ids(whole)
    assert contents == whole["choices"][0]["logprobs"]["content"]
    assert [int(event_id) for event_id, _ in pairs] == list(range(len(pairs)))
    assert int(usage_id) == len(pairs)
    assert usage["choices"] == []
    assert list(usage["usage"]) == ["prompt_tokens", "total_tokens", "completion_tokens"]


async def test_a_stream_of_several_choices_resumes_at_any_event(http: httpx.AsyncClient) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
    whole = await ok(http, GENERATE, body | {"stream": False})
    answer = await http.post(GENERATE, json=body)
    pairs = events(answer.text)[:-1]
    for index in range(3):
        mine = [event["choices"][0] for _, event in pairs if event["choices"][0]["index"] == index]
        ids = [token_id for choice in mine for token_id in choice["token_ids"]]
        assert ids == whole["choices"][index]["token_ids"]
    request_id = answer.headers["x-request-id"]
    for i, (event_id, _) in enumerate(pairs):
        rest = await http.get(
            f"/v1/requests/{request_id}/stream", headers={"last-event-id": event_id}
        )
        assert events(rest.text)[:-1] == pairs[i + 1 :]


async def test_log_probabilities_of_the_prompt_and_in_text(http: httpx.AsyncClient) -> None:
    rendered = await ok(http, RENDER, chat())
    sampling = rendered["sampling_params"] | {"logprobs": 1, "prompt_logprobs": 0}
    body = rendered | {"sampling_params": sampling, "output_mode": "text"}
    answer = await ok(http, GENERATE, body)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in others] == [[str(t)] for t in rendered["token_ids"][1:]]
    (choice,) = answer["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).startswith(
        choice["text"]
    )


async def test_abort_ends_a_request_with_its_tokens_so_far(http: httpx.AsyncClient) -> None:
    body = {
        "request_id": "to-be-aborted",
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 900, "ignore_eos": True},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = ""
    async with http.stream("POST", GENERATE, json=body) as answer:
        async for part in answer.aiter_text():
            if not text:
                abort = {"request_ids": ["generate-tokens-to-be-aborted", "never-heard-of"]}
                aborted = await http.post("/inference/v1/abort_requests", json=abort)
                assert (aborted.status_code, aborted.content) == (200, b"")
            text += part
    *pairs, (_, last), (_, usage), (_, done) = events(text)
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "abort"
    num_tokens = sum(len(event["choices"][0]["token_ids"]) for _, event in pairs)
    assert usage["usage"]["completion_tokens"] == num_tokens < 900


async def test_only_a_name_in_the_header_is_idempotent(
    http: httpx.AsyncClient,
) -> None:
    body = {"request_id": "mine", "token_ids": [5], "sampling_params": {"max_tokens": 2}}
    other = body | {"token_ids": [9, 9], "return_token_ids": True}
    await ok(http, GENERATE, body)
    assert (await ok(http, GENERATE, other))["prompt_token_ids"] == [9, 9]
    named = {"X-Request-Id": "its-name"}
    first = await ok(http, GENERATE, body, **named)
    assert first["request_id"] == "generate-tokens-its-name"
    assert await ok(http, GENERATE, body, **named) == first
    reused = await http.post(GENERATE, json=other, headers=named)
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "request_id_reused")


async def test_a_tenant_does_not_find_what_another_has_cached(another: Start) -> None:
    names = ("one", "two")
    keys = [{"name": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in names]
    gateway = another(api_keys=keys)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        mine, theirs = ({"authorization": f"Bearer {name}"} for name in names)
        rendered = await ok(http, RENDER, chat("letter_k.png"), **mine)
        await ok(http, GENERATE, rendered, **mine)
        features = rendered["features"] | {"kwargs_data": None, "mm_metadata": None}
        bare = rendered | {"features": features}
        await ok(http, GENERATE, bare, **mine)
        answer = await http.post(GENERATE, json=bare, headers=theirs)
        assert answer.json()["error"]["code"] == "mm_cache_miss"


async def test_each_error_has_its_status_and_names_its_field(http: httpx.AsyncClient) -> None:
    base: dict[str, Any] = {"model": "demo", "token_ids": [5, 6], "sampling_params": {}}
    few = {"max_tokens": 2}
    image: dict[str, Any] = await ok(http, RENDER, chat("red.png"))

    def with_item(text: str) -> dict[str, Any]:
        features = image["features"] | {"kwargs_data": {"image": [text]}, "mm_metadata": None}
        return image | {"features": features}

    cases: list[tuple[dict[str, Any], int, str, str | None]] = [
        (base | {"token_ids": []}, 400, "invalid_request", "body.token_ids"),
        (base | {"sampling_params": {"temperature": -1}}, 400, "invalid_request", "temperature"),
        (base | {"sampling_params": {"max_tokens": 0}}, 400, "invalid_request", "max_tokens"),
        (base | {"token_ids": [1, 999_999]}, 400, "invalid_request", None),
        (base | {"token_ids": [5] * 3000}, 400, "context_length_exceeded", None),
        (
            base | {"sampling_params": {"max_tokens": 5000}},
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        (base | {"model": "zzz"}, 404, "unknown_model", "model"),
        (base | {"nonsense": 3}, 400, "unknown_parameter", "body.nonsense"),
        (base | {"sampling_params": few | {"foo": 1}}, 400, "unknown_parameter", "foo"),
        (with_item("AQI="), 400, "invalid_request", "features.kwargs_data.image[0]"),
        (with_item("!"), 400, "invalid_request", "body.features.kwargs_data.image.0"),
    ]
    for body, status, code, param in cases:
        actual, error = await refused(http, GENERATE, body)
        assert (actual, error["code"], error["param"]) == (status, code, param), error
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_body_that_is_not_json_is_refused_with_400(http: httpx.AsyncClient) -> None:
    for path in (GENERATE, RENDER, "/tokenize"):
        answer = await http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 400, path
        headers = {"content-type": "application/json"}
        answer = await http.post(path, content=b"{", headers=headers)
        assert answer.status_code == 400, path
