"""Prompts in other forms than messages, through the whole of Pagemill."""

import secrets
from typing import Any

import msgspec

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.client import ask, new_request_id, pin_media, render_features, tokenize
from shared.protocol.names import scoped_id
from shared.protocol.records import Failure, Finish, LogRecord
from shared.protocol.renderer_rpc import FeaturesRequest, TokenizeRequest
from shared.protocol.requests import (
    ContentPart,
    Feature,
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
)
from shared.protocol.sampling import SamplingParams
from tests.cluster.streams import assert_gapless, text_of, tokens_of
from tests.support.media import data_url

SAMPLING = SamplingParams(temperature=0.0, max_tokens=24)


def image(name: str) -> ImagePart:
    return ImagePart(ImageURL(data_url((IMAGES / name).read_bytes())))


def question(*names: str) -> GenerateRequest:
    parts: list[ContentPart] = [
        *map(image, names),
        TextPart("What color is this image? Answer in one word."),
    ]
    return GenerateRequest("demo", [Message("user", parts)], SAMPLING)


async def answer(
    bus: Bus, request: GenerateRequest, tenant: str = "", **more: Any
) -> list[LogRecord]:
    request_id = scoped_id(new_request_id(), tenant)
    return [record async for record in ask(bus, request, request_id, **more)]


async def processed(bus: Bus, request: GenerateRequest, tenant: str = "") -> GenerateRequest:
    """The same request, rendered by somebody else."""
    rendered = await render_features(bus, FeaturesRequest(request))
    features = []
    for feature in rendered.features:
        assert feature.kwargs_data is not None
        data = await pin_media(bus, feature.kwargs_data, tenant)
        where = feature.placeholder
        features.append(Feature("image", feature.mm_hash, where.offset, where.length, data))
    return GenerateRequest(
        "demo",
        sampling_params=SAMPLING,
        prompt_token_ids=rendered.prompt_token_ids,
        features=features,
    )


async def test_a_processed_image_gets_the_same_answer_to_the_token(client: Bus) -> None:
    for names in (("red.png",), ("green_circle.png", "blue.png")):
        request = question(*names)
        ours = await answer(client, request)
        theirs = await answer(client, await processed(client, request))
        assert_gapless(theirs)
        assert isinstance(theirs[-1], Finish)
        assert isinstance(ours[-1], Finish)
        assert tokens_of(theirs) == tokens_of(ours)
        assert text_of(theirs) == text_of(ours)
        assert theirs[-1].usage.prompt_tokens == ours[-1].usage.prompt_tokens
        assert [hop.stage for hop in theirs[-1].path] == ["coordinator", "renderer", "engine"]


async def test_a_hash_alone_gets_the_same_answer_for_its_tenant(client: Bus) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    request = await processed(client, question("red.png"), tenant)
    (feature,) = (msgspec.structs.replace(f, mm_hash=tenant) for f in request.features)
    request = msgspec.structs.replace(request, features=[feature])
    bare = msgspec.structs.replace(request, features=[msgspec.structs.replace(feature, data=None)])
    first = await answer(client, request, tenant=tenant)
    assert "red" in text_of(first).lower()
    assert tokens_of(await answer(client, bare, tenant=tenant)) == tokens_of(first)
    for other in ("", "other"):
        (failure,) = await answer(client, bare, tenant=other)
        assert isinstance(failure, Failure)
        assert failure.error.code == "mm_cache_miss"
        assert failure.error.field == "features.kwargs_data.image[0]"


async def test_a_text_and_its_tokens_get_the_same_answer(client: Bus) -> None:
    text = "What can you do?"
    counted = await tokenize(client, "demo", TokenizeRequest(prompt=text))
    by_text = await answer(client, GenerateRequest("demo", None, SAMPLING, prompt=text))
    by_tokens = await answer(
        client, GenerateRequest("demo", None, SAMPLING, prompt_token_ids=counted.token_ids)
    )
    assert isinstance(by_text[-1], Finish)
    assert by_text[-1].usage.prompt_tokens == counted.count
    assert tokens_of(by_text) == tokens_of(by_tokens)


async def test_what_was_given_wins_over_the_models_defaults(client: Bus) -> None:
    """`max_tokens: 64` is configured, and `null`, the default, is what no Struct would send."""
    request = GenerateRequest("demo", [Message("user", "What can you do?")])
    endless = {"ignore_eos": True, "min_tokens": 70}
    refused = await answer(client, request, sampling=endless)
    assert isinstance(refused[-1], Failure)
    assert refused[-1].error.field == "sampling_params.min_tokens"
    records = await answer(client, request, sampling=endless | {"max_tokens": None})
    assert len(tokens_of(records)) > 900, "up to the model's 1024"


async def test_no_prompt_and_two_are_refused(client: Bus) -> None:
    for request, field in (
        (GenerateRequest("demo"), "messages"),
        (GenerateRequest("demo", prompt="a", prompt_token_ids=[1]), "prompt_token_ids"),
    ):
        (failure,) = await answer(client, request)
        assert isinstance(failure, Failure)
        assert (failure.error.code, failure.error.field) == ("invalid_request", field)
