"""Every row of the protocol's error table, and bodies of renderers, which must be accepted."""

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import RequestError
from shared.protocol.sampling import SamplingParams
from workers.gateway.http.body_types import decoded
from workers.gateway.schemas.generate import PlaceholderInfo, RenderedRequest
from workers.gateway.vllm.generate_request import ParsedRequest, parse, shape_of
from workers.gateway.vllm.sampling import write_sampling

RECORDED = Path(__file__).parent / "recorded"
GRID = {"data": ["int64", [3], msgspec.msgpack.Ext(3, bytes(24))], "field": ["batched", {}]}
ITEM = msgspec.msgpack.encode({"image_grid_thw": GRID, "pixel_values": 1})


def recorded(name: str) -> Any:
    return msgspec.json.decode((RECORDED / f"{name}.json").read_bytes())


def packed(item: bytes = ITEM) -> str:
    return base64.b64encode(item).decode()


def with_image(**changed: Any) -> dict[str, Any]:
    features = {
        "mm_hashes": {"image": ["h"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
        "kwargs_data": {"image": [packed()]},
        "mm_metadata": None,
    }
    return {"token_ids": [1, 2, 2, 3], "features": features | changed, "sampling_params": {}}


def read(data: bytes) -> ParsedRequest:
    return parse(decoded(data, RenderedRequest, root="body"))


def refused(body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body if isinstance(body, bytes) else msgspec.json.encode(body))
    return caught.value


def test_values_are_counted_before_they_are_decoded() -> None:
    flood: list[list[int]] = [[]] * 50_000
    in_body = refused({"token_ids": [1], "sampling_params": {"extra_args": flood}})
    assert in_body.field == "body.sampling_params"
    assert "at most 50000 values" in in_body.message
    # With metadata, an item is decoded whole and without a type.
    item = packed(msgspec.msgpack.encode({"a": flood}))
    metadata = packed(msgspec.msgpack.encode({}))
    in_item = refused(with_image(kwargs_data={"image": [item]}, mm_metadata={"image": [metadata]}))
    assert in_item.field == "body.features.kwargs_data.image.0"
    assert "at most 50000 values" in in_item.message


@pytest.mark.parametrize("rendered", [recorded("render_text"), recorded("render_completion")])
def test_bodies_of_another_renderer_are_accepted_unchanged(rendered: dict[str, Any]) -> None:
    bodies: Any = msgspec.json.decode(msgspec.json.encode(rendered["response"]))
    for body in bodies or []:
        if isinstance(body, str):
            body = rendered["response"]
        parsed = read(msgspec.json.encode(body))
        request = rendered["request"]
        assert parsed.body.token_ids == body["token_ids"]
        assert parsed.sampling["max_tokens"] == request["max_tokens"]
        assert parsed.sampling["temperature"] == request.get("temperature", 1.0)
        assert parsed.items == []


def test_missing_parameters_but_max_tokens_have_their_defaults() -> None:
    sampling = read(b'{"token_ids":[1],"sampling_params":{"top_k":-1}}').sampling
    assert "max_tokens" not in sampling
    assert (sampling["temperature"], sampling["top_k"], sampling["n"]) == (1.0, 0, 1)
    unlimited = read(b'{"token_ids":[1],"sampling_params":{"max_tokens":null}}').sampling
    assert unlimited["max_tokens"] is None


@pytest.mark.parametrize(
    "wire",
    [
        {"stop": "a", "output_text_buffer_length": 0, "output_kind": 1, "skip_clone": True},
        {"stop_token_ids": [5], "_all_stop_token_ids": [5], "bad_words": None, "seed": -1},
        {"logit_bias": {"7": 1.5}, "allowed_token_ids": [7], "skip_reading_prefix_cache": None},
        {"structured_outputs": {"json": '{"type":"object"}', "disable_any_whitespace": False}},
        {"spaces_between_special_tokens": True, "extra_args": None, "stream_interval": 1},
    ],
)
def test_parameters_with_the_values_of_renderers_are_accepted(wire: dict[str, Any]) -> None:
    sampling = read(msgspec.json.encode({"token_ids": [1], "sampling_params": wire})).sampling
    msgspec.convert(sampling, SamplingParams, str_keys=True)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_request", "body"),
        (b"[1]", "invalid_request", "body"),
        ({"token_ids": [], "sampling_params": {}}, "invalid_request", "body.token_ids"),
        ({"token_ids": [1, -5], "sampling_params": {}}, "invalid_request", "body.token_ids"),
        ({"token_ids": ["a"], "sampling_params": {}}, "invalid_request", "body.token_ids[0]"),
        ({"token_ids": [1]}, "invalid_request", "body.sampling_params"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, None, "temperature"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, None, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"n": 100}}, None, "n"),
        ({"token_ids": [1], "sampling_params": {"n": 2, "temperature": 0}}, None, "n"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": 5}}, None, "stop_token_ids"),
        (
            {"token_ids": [1], "sampling_params": {"structured_outputs": {"json": "[" * 5000}}},
            None,
            "structured_outputs",
        ),
        (
            {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": 0}}},
            None,
            "structured_outputs",
        ),
        (
            {"token_ids": [1], "sampling_params": {}, "request_id": "x" * 257},
            None,
            "body.request_id",
        ),
        ({"token_ids": [1], "sampling_params": {"foo": 1}}, "unknown_parameter", "foo"),
        ({"token_ids": [1], "sampling_params": {}, "x": 3}, "unknown_parameter", "body.x"),
        ({"token_ids": [1], "sampling_params": {}, "cache_salt": ""}, None, "cache_salt"),
        ({"token_ids": [1], "sampling_params": {}, "cache_salt": "a@b"}, None, "cache_salt"),
        (
            {"token_ids": [1], "sampling_params": {"detokenize": False}, "output_mode": "text"},
            None,
            "body",
        ),
        (
            {"token_ids": [1], "sampling_params": {}, "ec_transfer_params": {"a": 1}},
            "unsupported_parameter",
            "body.ec_transfer_params",
        ),
        (
            {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "unsupported_parameter",
            "prompt_logprobs",
        ),
        (with_image(mm_hashes={"image": []}), None, "body.features"),
        (with_image(mm_hashes={"audio": ["h"]}), None, "body.features"),
        (with_image(kwargs_data={"image": []}), None, "body.features"),
        (
            with_image(mm_placeholders={"image": [{"offset": 1, "length": 0}]}),
            None,
            "body.features.mm_placeholders.image.0.length",
        ),
        (with_image(mm_placeholders={"image": [{"offset": 3, "length": 2}]}), None, "body"),
        (
            with_image(
                mm_hashes={"image": ["a", "b"]},
                mm_placeholders={"image": [{"offset": 1, "length": 2}, {"offset": 2, "length": 1}]},
                kwargs_data=None,
            ),
            None,
            "body.features",
        ),
        (
            with_image(kwargs_data={"image": [None]}, mm_metadata={"image": ["gA=="]}),
            None,
            "body",
        ),
        (with_image() | {"content_parts": [{"type": "image_url", "url": "x"}]}, None, "body"),
        (
            with_image(kwargs_data={"image": ["!!!!notb64"]}),
            None,
            "body.features.kwargs_data.image.0",
        ),
        (
            with_image(kwargs_data={"image": ["AQI="]}, mm_metadata={"image": [packed()]}),
            None,
            "body.features.kwargs_data.image.0",
        ),
    ],
)
def test_an_error_names_its_field(body: Any, code: str | None, param: str) -> None:
    error = refused(body)
    assert (error.code, error.field) == (code or "invalid_request", param)


def test_images_come_in_the_order_of_the_prompt() -> None:
    body = with_image(
        mm_hashes={"image": ["late", "early"]},
        mm_placeholders={"image": [{"offset": 2, "length": 2}, {"offset": 0, "length": 1}]},
        kwargs_data={"image": [packed(), None]},
    )
    items = read(msgspec.json.encode(body)).items
    assert [(item.mm_hash, item.data) for item in items] == [("early", None), ("late", ITEM)]


def test_metadata_override_an_item_only_where_they_differ() -> None:
    same = packed(msgspec.msgpack.encode({"image_grid_thw": GRID}))
    (item,) = read(msgspec.json.encode(with_image(mm_metadata={"image": [same]}))).items
    assert item.data == ITEM
    other = packed(msgspec.msgpack.encode({"pixel_values": 2}))
    (item,) = read(msgspec.json.encode(with_image(mm_metadata={"image": [other]}))).items
    assert item.data is not None
    assert msgspec.msgpack.decode(item.data)["pixel_values"] == 2


def test_the_shape_has_only_what_the_answer_needs() -> None:
    plain = shape_of(read(msgspec.json.encode(with_image())), "w")
    assert (plain.num_prompt_tokens, plain.prompt_token_ids, plain.placeholders) == (4, [], {})
    body = with_image() | {
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    fields = shape_of(read(msgspec.json.encode(body)), "w")
    assert fields.prompt_token_ids == [1, 2, 2, 3]
    assert fields.placeholders == {"image": [PlaceholderInfo(1, 2)]}
    # As in vLLM, the one has no effect without the other.
    assert (fields.include_usage, fields.continuous_usage) == (False, False)


@pytest.mark.parametrize("name", ["render_text", "render_completion"])
def test_sampling_is_written_as_recorded(name: str) -> None:
    exchange = recorded(name)
    request, answers = exchange["request"], exchange["response"]
    params = SamplingParams(temperature=float(request.get("temperature", 1.0)))
    written = write_sampling(params, request["max_tokens"], stream=False)
    for answer in answers if isinstance(answers, list) else [answers]:
        assert msgspec.json.encode(written) == msgspec.json.encode(answer["sampling_params"])
