"""Admission: accepted messages, and the error of each wrong message."""

import json
from typing import Any

import msgspec
import pytest

from shared.config.schema import ModelConfig, StageConfig
from shared.errors import (
    InvalidRequest,
    RequestError,
    UnknownAdapter,
    UnknownModel,
    UnsupportedContent,
)
from shared.protocol.encoding import ClientDecoder
from shared.protocol.images import PaintParams
from shared.protocol.requests import GenerateRequest, tenant_of
from shared.protocol.sampling import SamplingParams
from shared.stage.pipelines import pipeline_of
from workers.coordinator import admission
from workers.coordinator.admission import Admitted, admit, most_tokens

MODELS = {"demo": ModelConfig(path="x", sampling_defaults={"temperature": 0.0, "max_tokens": 64})}
PIPELINES = {name: pipeline_of(model) for name, model in MODELS.items()}
GOOD: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def sampling_of(request: dict[str, Any]) -> SamplingParams:
    return admit("pm.request.demo.r1", "r1", json.dumps(request).encode(), MODELS, PIPELINES)[1]


def test_parameters_left_out_take_the_models_defaults() -> None:
    assert sampling_of(GOOD) == SamplingParams(temperature=0.0, max_tokens=64)


def test_given_parameters_win_even_when_they_equal_the_general_default() -> None:
    body = GOOD | {"sampling_params": {"temperature": 1.0, "max_tokens": None}}
    assert sampling_of(body) == SamplingParams(temperature=1.0, max_tokens=None)


def test_the_error_about_a_subject_has_the_subjects_that_the_tenant_publishes_to() -> None:
    data = json.dumps(GOOD | {"model": "other"}).encode()
    with pytest.raises(InvalidRequest) as refused:
        admit("pm.request.@local.key.demo.r1", "r1@local", data, MODELS, PIPELINES)
    subjects = "pm.request.other.r1, not pm.request.demo.r1"
    assert refused.value.message == f"the subject of model 'other' is {subjects}"


def test_token_ids_are_strings_where_json_wants_keys() -> None:
    body = GOOD | {"sampling_params": {"logit_bias": {"17": -100, "3": 2.5}}}
    assert sampling_of(body).logit_bias == {17: -100.0, 3: 2.5}
    packed = msgspec.msgpack.encode(GOOD | {"sampling_params": {"logit_bias": {17: -100}}})
    admitted = admit("pm.request.demo.r1", "r1", packed, MODELS, PIPELINES)
    assert admitted.sampling.logit_bias == {17: -100.0}


def test_an_embedding_has_no_sampling_parameters_not_even_defaults() -> None:
    assert sampling_of(GOOD | {"embedding": {"dimensions": 3}}) == SamplingParams()
    with pytest.raises(InvalidRequest) as refused:
        sampling_of(GOOD | {"embedding": {}, "sampling_params": {"n": 2}})
    assert refused.value.field == "sampling_params"
    with pytest.raises(InvalidRequest) as refused:
        sampling_of(GOOD | {"embedding": {}, "outputs": ["text"]})
    assert refused.value.field == "outputs"


def test_msgpack_is_as_good_as_json() -> None:
    as_json = admit("pm.request.demo.r1", "r1", json.dumps(GOOD).encode(), MODELS, PIPELINES)
    as_msgpack = admit("pm.request.demo.r1", "r1", msgspec.msgpack.encode(GOOD), MODELS, PIPELINES)
    assert as_json == as_msgpack


def with_content(part: Any) -> dict[str, Any]:
    return GOOD | {"messages": [{"role": "user", "content": [part]}]}


def with_sampling(**params: Any) -> dict[str, Any]:
    return GOOD | {"sampling_params": params}


BAD: list[tuple[dict[str, Any] | bytes, type[RequestError], str | None, str]] = [
    (b'{"model": "demo", "mess', InvalidRequest, None, "JSON"),
    (b"", InvalidRequest, None, "JSON"),
    (b"not json", InvalidRequest, None, "JSON"),
    (b"\xff\xfe\xfd", InvalidRequest, None, "object"),
    (b"\x82\xa5model", InvalidRequest, None, "msgpack"),
    (b"\xdd\xff\xff\xff\xff", InvalidRequest, None, "object"),
    (b'{"a":' * 100_000, InvalidRequest, "a", "64 levels of nesting"),
    ({"model": "demo"}, InvalidRequest, "messages", "messages"),
    (GOOD | {"messages": []}, InvalidRequest, "messages", "at least 1"),
    (GOOD | {"model": "other"}, InvalidRequest, "model", "subject"),
    (GOOD | {"tenant": "somebody"}, InvalidRequest, "tenant", "unknown field"),
    (GOOD | {"cache_key": "somebody"}, InvalidRequest, "cache_key", "unknown field"),
    (GOOD | {"temperatur": 1}, InvalidRequest, "temperatur", "unknown field"),
    (GOOD | {"max_tokens": 9}, InvalidRequest, "max_tokens", "sampling_params.max_tokens"),
    (GOOD | {"request_id": "r1"}, InvalidRequest, "request_id", "unknown field"),
    (with_sampling(temperatur=1), InvalidRequest, "sampling_params.temperatur", "unknown field"),
    (with_sampling(temperature=-1), InvalidRequest, "sampling_params.temperature", "at least 0"),
    (with_sampling(temperature=2.5), InvalidRequest, "sampling_params.temperature", "at most 2"),
    (with_sampling(temperature="hot"), InvalidRequest, "sampling_params.temperature", "a number"),
    (with_sampling(top_p=0), InvalidRequest, "sampling_params.top_p", "more than 0"),
    (with_sampling(top_k=-1), InvalidRequest, "sampling_params.top_k", "at least 0"),
    (with_sampling(min_p=1.1), InvalidRequest, "sampling_params.min_p", "at most 1"),
    (with_sampling(n=0), InvalidRequest, "sampling_params.n", "at least 1"),
    (with_sampling(n=9), InvalidRequest, "sampling_params.n", "at most 8"),
    (with_sampling(n=2**63), InvalidRequest, "sampling_params.n", "at most 8"),
    (with_sampling(max_tokens=0), InvalidRequest, "sampling_params.max_tokens", "at least 1"),
    (with_sampling(seed=-1), InvalidRequest, "sampling_params.seed", "at least 0"),
    (with_sampling(stop=["a"] * 5), InvalidRequest, "sampling_params.stop", "at most 4"),
    (
        with_sampling(logit_bias={"-1": 1}),
        InvalidRequest,
        "sampling_params.logit_bias",
        "at least 0",
    ),
    (with_sampling(logit_bias={"x": 1}), InvalidRequest, "sampling_params.logit_bias", "a whole"),
    (
        with_sampling(logit_bias={"1": 101}),
        InvalidRequest,
        "sampling_params.logit_bias[...]",
        "at most 100",
    ),
    (with_sampling(allowed_token_ids=[]), InvalidRequest, "sampling_params.allowed_token_ids", ""),
    (with_sampling(bad_words=[" "]), InvalidRequest, "sampling_params.bad_words[0]", "blank"),
    (with_sampling(logprobs=21), InvalidRequest, "sampling_params.logprobs", "at most 20"),
    (
        with_sampling(prompt_logprobs=-1),
        InvalidRequest,
        "sampling_params.prompt_logprobs",
        "at least 0",
    ),
    (with_sampling(stop=[""]), InvalidRequest, "sampling_params.stop[0]", "at least 1"),
    (with_sampling(repetition_penalty=0), InvalidRequest, "sampling_params.repetition_penalty", ""),
    (with_content({"type": "smell"}), InvalidRequest, "messages[0].content[0].type", "smell"),
    (
        with_content({"type": "input_audio", "input_audio": {}}),
        UnsupportedContent,
        "messages[0].content[0].type",
        "input_audio",
    ),
    (with_content({"type": "text"}), InvalidRequest, "messages[0].content[0].text", "missing"),
    (
        GOOD | {"messages": [{"role": "robot", "content": "hi"}]},
        InvalidRequest,
        "messages[0].role",
        "robot",
    ),
    (GOOD | {"on_late": "text"}, InvalidRequest, "on_late", "another output"),
    (GOOD | {"on_late": "never"}, InvalidRequest, "on_late", "never"),
]


@pytest.mark.parametrize(("body", "kind", "field", "part"), BAD)
def test_what_is_wrong_is_named(
    body: dict[str, Any] | bytes, kind: type[RequestError], field: str | None, part: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        admit("pm.request.demo.r1", "r1", data, MODELS, PIPELINES)
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_frames": -1}, "at least 1"),
        ({"fps": 1e-9}, "at least 0.001"),
        ({"fps": 1e9}, "at most 240"),
        ({"fps": "2"}, "a number"),
        ({"max_frames": 0}, "at least 1"),
    ],
)
def test_options_of_a_video_are_checked(fields: dict[str, Any], message: str) -> None:
    part = {"type": "video_url", "video_url": {"url": "data:,"} | fields}
    with pytest.raises(InvalidRequest, match=message) as caught:
        sampling_of(with_content(part))
    assert caught.value.field is not None
    assert caught.value.field.endswith(f"video_url.{next(iter(fields))}")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "flac"}},
        {"type": "image_embeds", "image_embeds": "AA"},
        {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    ],
    ids=lambda part: part["type"],
)
def test_parts_that_no_stage_takes_are_named(part: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedContent) as caught:
        sampling_of(with_content(part))
    assert caught.value.field == "messages[0].content[0].type"


EMPTY_LISTS = 7_900_000


@pytest.mark.parametrize(
    "data",
    [
        b"\x83\xa5model\xa4demo\xa8messages\x91\x82\xa4role\xa4user\xa7content\xa2hi"
        b"\xaftemplate_kwargs\x81\xa1a\xdd%b%b"
        % (EMPTY_LISTS.to_bytes(4, "big"), b"\x90" * EMPTY_LISTS),
        json.dumps(GOOD | {"template_kwargs": {"a": []}})
        .encode()
        .replace(b"[]}}", b"[%b[]]}}" % (b"[]," * (EMPTY_LISTS // 3))),
    ],
    ids=["msgpack", "json"],
)
def test_a_flood_of_values_is_refused_before_anything_is_decoded(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    class CountingDecoder:
        def __init__(self, *_: object) -> None:
            pass

        def decode(self, data: bytes) -> Any:
            decoded.append(len(data))
            raise msgspec.DecodeError("these bytes must not come here")

    with monkeypatch.context() as patch:
        patch.setattr("msgspec.json.Decoder", CountingDecoder)
        patch.setattr("msgspec.msgpack.Decoder", CountingDecoder)
        patch.setattr(admission, "decode_request", ClientDecoder(GenerateRequest))
        with pytest.raises(InvalidRequest, match="at most 50000 values") as caught:
            admit("pm.request.demo.r1", "r1", data, MODELS, PIPELINES)
    assert caught.value.field == "template_kwargs"
    assert decoded == []


def test_the_error_of_an_unknown_model_lists_the_models() -> None:
    body = json.dumps(GOOD | {"model": "other"}).encode()
    with pytest.raises(UnknownModel, match="demo"):
        admit("pm.request.other.r1", "r1", body, MODELS, PIPELINES)


def test_an_adapter_is_one_of_the_models_own() -> None:
    models = MODELS | {"tuned": ModelConfig(path="x", adapters={"pirate": "p", "formal": "f"})}
    pipelines = {name: pipeline_of(model) for name, model in models.items()}
    body = GOOD | {"model": "tuned", "adapter": "pirate"}
    request, *_ = admit("pm.request.tuned.r1", "r1", json.dumps(body).encode(), models, pipelines)
    assert request.adapter == "pirate"
    for model, named in (("tuned", "formal, pirate"), ("demo", "none")):
        body = GOOD | {"model": model, "adapter": "other"}
        with pytest.raises(UnknownAdapter, match=named) as caught:
            admit(f"pm.request.{model}.r1", "r1", json.dumps(body).encode(), models, pipelines)
        assert caught.value.field == "adapter"


@pytest.mark.parametrize(("header", "tenant"), [(None, ""), ("a-1_B", "a-1_B"), ("x" * 128,) * 2])
def test_a_header_says_for_whom_a_request_is(header: str | None, tenant: str) -> None:
    assert tenant_of(header) == tenant


@pytest.mark.parametrize("header", ["", "x" * 129, "a.b", "a b", "é", "a\n"])
def test_a_tenant_that_is_no_name_is_refused_rather_than_taken_for_none(header: str) -> None:
    with pytest.raises(InvalidRequest, match="128") as caught:
        tenant_of(header)
    assert caught.value.field == "Pagemill-Tenant"


def test_the_subject_of_a_model_has_its_encoded_name() -> None:
    name = "org/demo.v1"
    models = MODELS | {name: ModelConfig(path="x")}
    pipelines = {model: pipeline_of(config) for model, config in models.items()}
    body = json.dumps(GOOD | {"model": name}).encode()
    request, *_ = admit("pm.request.org=2Fdemo=2Ev1.r1", "r1", body, models, pipelines)
    assert request.model == name
    with_key = "pm.request.@acme.key.org=2Fdemo=2Ev1.r1"
    assert admit(with_key, "r1@acme", body, models, pipelines).request.model == name
    for wrong in (
        "pm.request.org/demo.v1.r1", "pm.request.org=2fdemo=2Ev1.r1", "pm.request.demo.r1",
        "pm.request.org=2Fdemo=2Ev1.r2", "pm.request.@acme.org=2Fdemo=2Ev1.r1",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            admit(wrong, "r1", body, models, pipelines)
        assert caught.value.field == "model"
        for part in (name, "pm.request.org=2Fdemo=2Ev1.r1", wrong):
            assert part in caught.value.message


PAINTER = {
    "role": "generator",
    "inputs": {"prompt": {"from": "request", "function": "paint"}},
    "output": {"name": "image", "kind": "image"},
    "sizes": ["96x96", "64x96"],
    "sampling_defaults": {"steps": 20, "guidance": 3.0},
}
OFF = {"enabled": False}
PAINTERS = {
    "painter": ModelConfig(
        "x",
        stages=msgspec.convert(
            {"renderer": OFF, "engine": OFF, "dit": PAINTER}, dict[str, StageConfig]
        ),
    ),
    "demo": MODELS["demo"],
}


def admit_image(model: str = "painter", **fields: Any) -> Admitted:
    data = json.dumps({"model": model, "prompt": "a star", **fields}).encode()
    pipelines = {name: pipeline_of(config) for name, config in PAINTERS.items()}
    return admit(f"pm.request.{model}.r1", "r1", data, PAINTERS, pipelines)


def test_images_are_painted_as_asked_and_else_as_the_stage_is_configured() -> None:
    admitted = admit_image()
    assert admitted.outputs == ["image"]
    assert admitted.image == PaintParams("96x96", steps=20, guidance=3.0)
    options = {"size": "64x96", "n": 2, "steps": 24, "guidance": 2.5, "seed": 7}
    assert admit_image(image=options).image == PaintParams("64x96", 2, 24, 2.5, "", 7)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"image": {"size": "96x97"}}, "image.size", "available: 96x96, 64x96"),
        ({"image": {"size": "large"}}, "image.size", ""),
        ({"image": {"n": 11}}, "image.n", "at most 10"),
        ({"image": {"steps": 201}}, "image.steps", "at most 200"),
        ({"image": {"guidance": -1}}, "image.guidance", "at least 0"),
        ({"image": {"style": "vivid"}}, "image.style", "unknown field"),
        ({"prompt": " "}, "prompt", "a text"),
        (
            {"prompt": None, "messages": GOOD["messages"]},
            "model",
            "painter answers no messages: it generates images from a prompt",
        ),
        ({"sampling_params": {"seed": 1}}, "sampling_params", "no tokens"),
        ({"model": "demo", "image": {}}, "image", "these outputs have no images"),
    ],
)
def test_an_image_that_cannot_be_painted_is_refused(
    fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        admit_image(**fields)
    assert refused.value.field == field
    assert message in refused.value.message


def admit_video(model: str = "film", **fields: Any) -> Admitted:
    models = {"film": ModelConfig("x", graph="wan"), "painter": PAINTERS["painter"]}
    data = json.dumps({"model": model, "prompt": "a star", **fields}).encode()
    pipelines = {name: pipeline_of(config) for name, config in models.items()}
    return admit(f"pm.request.{model}.r1", "r1", data, models, pipelines)


def test_a_video_is_made_as_asked_and_else_as_the_model_was_trained() -> None:
    admitted = admit_video()
    assert admitted.outputs == ["video"]
    assert admitted.image == PaintParams("832x480", 1, 50, 5.0, frames=81, fps=16)
    assert most_tokens(admitted) == 0
    options = {"size": "480x832", "frames": 49, "fps": 24, "steps": 20, "guidance": 1, "seed": 7}
    expected = PaintParams("480x832", 1, 20, 1.0, "", 7, frames=49, fps=24)
    assert admit_video(video=options).image == expected


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"video": {"size": "90x90"}}, "video.size", "available: 832x480, 480x832, 1280x720"),
        ({"video": {"frames": 48}}, "video.frames", "such as 45 or 49, not 48"),
        ({"video": {"frames": 165}}, "video.frames", "over the model's limit of 161"),
        ({"video": {"fps": 0}}, "video.fps", "at least 1"),
        ({"video": {"n": 2}}, "video.n", "unknown field"),
        ({"prompt": " "}, "prompt", "a video needs a prompt with a text"),
        ({"sampling_params": {"seed": 1}}, "sampling_params", "a video has no tokens"),
        ({"image": {}}, "image", "these outputs have no images"),
        ({"model": "painter", "video": {}}, "video", "these outputs have no video"),
    ],
)
def test_a_video_that_cannot_be_made_is_refused(
    fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        admit_video(**fields)
    assert refused.value.field == field
    assert message in refused.value.message
