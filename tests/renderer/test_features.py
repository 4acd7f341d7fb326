"""Renderers with other servers: model cards, tokens, and images that other servers processed."""

import hashlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from shared import client
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.codec.vllm_kwargs import mm_hash
from shared.config.schema import ModelConfig
from shared.errors import InvalidRequest, MediaNotFound, UnsupportedContent
from shared.protocol import subjects
from shared.protocol.renderer_rpc import (
    DetokenizeRequest,
    FeaturesRequest,
    ModelCard,
    RenderedFeatures,
    TokenizeRequest,
)
from shared.protocol.requests import Feature, GenerateRequest, Message, Prompt
from shared.protocol.task_messages import EngineBody
from tests.renderer.rig import (
    Sink,
    config_for,
    messages_with,
    new_model,
    publish,
    renderer,
    task_for,
)
from tests.support.media import data_url, png
from workers.renderer.processing.processor import Processor
from workers.settings import DEMO_MODEL

IMAGE = png(1, (112, 56))


class Rig:
    def __init__(self, bus: Bus, model: str, sink: Sink) -> None:
        self.bus = bus
        self.model = model
        self._sink = sink

    async def features(
        self, messages: list[Message], tenant: str = "", **more: Any
    ) -> RenderedFeatures:
        call = FeaturesRequest(GenerateRequest(self.model, messages), **more)
        answer = await client.render_features(self.bus, call, tenant=tenant)
        return answer

    async def engine(self, prompt: Prompt, tenant: str = "", salt: str = "") -> EngineBody:
        """Return the engine's input, without regard to the place of the items' tensors."""
        await publish(self.bus, task_for(self.bus, self.model, prompt, tenant, salt))
        body, _ = await self._sink.next()
        return body

    async def refused(self, prompt: Prompt, tenant: str = "", salt: str = "") -> tuple[str, Any]:
        task = task_for(self.bus, self.model, prompt, tenant, salt)
        await publish(self.bus, task)
        (failure,) = [record async for record in client.follow(self.bus, task.header.request_id)]
        error = failure.error  # type: ignore[union-attr]
        assert error.fault == "client"
        return error.code, error.field

    async def asked_with(
        self, rendered: RenderedFeatures, tenant: str = "", name: str | None = None
    ) -> Prompt:
        """The answer of one renderer as the question to another."""
        features = []
        for feature in rendered.features:
            assert feature.kwargs_data is not None
            data = await client.pin_media(self.bus, feature.kwargs_data, tenant)
            where = feature.placeholder
            features.append(
                Feature("image", name or feature.mm_hash, where.offset, where.length, data)
            )
        return Prompt(token_ids=rendered.prompt_token_ids, features=features)


@pytest.fixture
async def rig(broker: EmbeddedServer, bus: Bus) -> AsyncIterator[Rig]:
    model = new_model()
    sink = await Sink.open(bus, model)
    async with renderer(broker.url, config_for(model)):
        yield Rig(bus, model, sink)


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(ModelConfig(str(DEMO_MODEL)))


def without_data(prompt: Prompt) -> Prompt:
    features = [msgspec.structs.replace(feature, data=None) for feature in prompt.features]
    return msgspec.structs.replace(prompt, features=features)


async def test_a_renderer_describes_its_model(rig: Rig, processor: Processor) -> None:
    card = await client.model_card(rig.bus, rig.model)
    assert card == ModelCard(
        rig.model,
        4096,
        768,
        True,
        True,
        "hermes",
        [None, None],
        hidden_size=192,
        media=["image", "video"],
    )


async def test_tokens_and_texts_go_both_ways(rig: Rig) -> None:
    text = "two wörds"
    counted = await client.tokenize(rig.bus, rig.model, TokenizeRequest(prompt=text))
    assert len(counted.token_strs) == counted.count == len(counted.token_ids)
    detokenized = await client.detokenize(rig.bus, rig.model, DetokenizeRequest(counted.token_ids))
    assert detokenized.prompt == text
    assert b"".join(detokenized.token_bytes) == text.encode()
    with pytest.raises(InvalidRequest) as refused:
        await client.detokenize(rig.bus, rig.model, DetokenizeRequest([768]))
    assert refused.value.field == "tokens[0]"


async def test_messages_are_counted_with_or_without_the_answers_beginning(rig: Rig) -> None:
    hello = [Message("user", "hello")]
    counts = []
    for has_beginning in (True, False):
        call = TokenizeRequest(hello, add_generation_prompt=has_beginning)
        answer = await client.tokenize(rig.bus, rig.model, call)
        counts.append(answer.count)
    assert counts[0] > counts[1]


async def test_images_are_rendered_for_other_servers(rig: Rig, processor: Processor) -> None:
    messages = messages_with([data_url(IMAGE), data_url(png(2))])
    rendered = await rig.features(messages)
    plain = await client.render(rig.bus, GenerateRequest(rig.model, messages))
    assert rendered.prompt_token_ids == plain[0].prompt_token_ids
    assert [f.placeholder for f in rendered.features] == [i.placeholder for i in plain[0].items]
    first = rendered.features[0]
    assert first.mm_hash == mm_hash("image", IMAGE, str(DEMO_MODEL))
    assert first.kwargs_data is not None
    assert first.mm_metadata is not None
    assert first.mm_metadata[1:] == first.kwargs_data[1 : len(first.mm_metadata)]
    bare = await rig.features(messages, payload="none")
    assert [(f.mm_hash, f.placeholder) for f in bare.features] == [
        (f.mm_hash, f.placeholder) for f in rendered.features
    ]
    assert all(f.kwargs_data is None and f.mm_metadata is None for f in bare.features)


async def test_stored_images_are_found_for_their_tenant_alone(rig: Rig) -> None:
    url = await client.pin_media(rig.bus, IMAGE, "a")
    messages = messages_with([url])
    assert (await rig.features(messages, tenant="a")).features
    for tenant in ("", "b"):
        call = FeaturesRequest(GenerateRequest(rig.model, messages))
        with pytest.raises(MediaNotFound):
            await client.render_features(rig.bus, call, tenant=tenant)
        with pytest.raises(MediaNotFound):
            await client.tokenize(rig.bus, rig.model, TokenizeRequest(messages), tenant=tenant)


async def test_an_engine_is_given_the_same_for_features_as_for_messages(rig: Rig) -> None:
    messages = messages_with([data_url(IMAGE), data_url(png(2))])
    prompt = await rig.asked_with(await rig.features(messages))
    theirs, ours = await rig.engine(prompt), await rig.engine(Prompt(messages))
    assert theirs.prompt_token_ids == ours.prompt_token_ids
    assert [i.placeholder for i in theirs.items] == [i.placeholder for i in ours.items]
    assert {i.mm_hash for i in theirs.items}.isdisjoint({i.mm_hash for i in ours.items})


async def test_a_claimed_hash_is_no_key_of_ours(rig: Rig) -> None:
    """Two items under one hash are two images, and one item under two hashes is one."""
    hashes = []
    for seed, name in ((1, "same"), (2, "same"), (2, "other")):
        rendered = await rig.features(messages_with([data_url(png(seed))]))
        task = await rig.engine(await rig.asked_with(rendered, name=name))
        hashes.append(task.items[0].mm_hash)
    assert hashes[0] != hashes[1] == hashes[2]


async def test_a_hash_that_was_sent_before_is_enough(rig: Rig) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    prompt = await rig.asked_with(await rig.features(messages_with([data_url(IMAGE)])), tenant)
    miss = ("mm_cache_miss", "features.kwargs_data.image[0]")
    assert await rig.refused(without_data(prompt), tenant) == miss
    first = await rig.engine(prompt, tenant)
    again = await rig.engine(without_data(prompt), tenant)
    assert again.items[0].mm_hash == first.items[0].mm_hash
    assert await rig.refused(without_data(prompt), "other") == miss
    assert await rig.refused(without_data(prompt)) == miss
    assert await rig.refused(without_data(prompt), tenant, "salt") == miss
    salted = await rig.engine(prompt, tenant, "salt")
    assert salted.items[0].mm_hash != first.items[0].mm_hash


async def test_the_latest_item_of_a_hash_counts_and_a_lost_one_is_a_miss(rig: Rig) -> None:
    name, hashes = f"h{secrets.token_hex(4)}", []
    for seed in (1, 2):
        rendered = await rig.features(messages_with([data_url(png(seed))]))
        prompt = await rig.asked_with(rendered, name=name)
        hashes.append((await rig.engine(prompt)).items[0].mm_hash)
    again = await rig.engine(without_data(prompt))
    assert again.items[0].mm_hash == hashes[1]


async def test_bytes_that_are_no_item_are_refused_and_not_stored(rig: Rig) -> None:
    rendered = await rig.features(messages_with([data_url(IMAGE)]))
    prompt = await rig.asked_with(rendered, name=f"h{secrets.token_hex(4)}")
    url = await client.pin_media(rig.bus, b"garbage" + secrets.token_bytes(4))
    (good,) = prompt.features
    field = "features.kwargs_data.image[0]"
    bad = msgspec.structs.replace(prompt, features=[msgspec.structs.replace(good, data=url)])
    assert await rig.refused(bad) == ("invalid_request", field)
    assert await rig.refused(without_data(prompt)) == ("mm_cache_miss", field)
    unknown = f"media:{hashlib.sha256(secrets.token_bytes(8)).hexdigest()}"
    lost = msgspec.structs.replace(prompt, features=[msgspec.structs.replace(good, data=unknown)])
    assert await rig.refused(lost) == ("media_not_found", field)
    short = msgspec.structs.replace(good, length=good.length - 1)
    misplaced = msgspec.structs.replace(prompt, features=[short])
    place = "features.mm_placeholders.image[0]"
    assert await rig.refused(misplaced) == ("invalid_request", place)


async def test_rendered_images_are_not_rendered_again(rig: Rig) -> None:
    feature = Feature("image", "h", 0, 1)
    request = GenerateRequest(rig.model, prompt_token_ids=[1], features=[feature])
    for call in (
        client.render(rig.bus, request),
        client.render_features(rig.bus, FeaturesRequest(request)),
    ):
        with pytest.raises(UnsupportedContent) as refused:
            await call
        assert refused.value.field == "features"


async def test_texts_and_tokens_are_rendered_as_they_are(rig: Rig) -> None:
    by_text = await rig.engine(Prompt(text="two words"))
    by_tokens = await rig.engine(Prompt(token_ids=by_text.prompt_token_ids))
    assert by_tokens.prompt_token_ids == by_text.prompt_token_ids
    assert await rig.refused(Prompt(token_ids=[1, 768])) == (
        "invalid_request",
        "prompt_token_ids[1]",
    )
    too_long = Prompt(token_ids=[1] * 4096)
    assert await rig.refused(too_long) == ("context_length_exceeded", "prompt_token_ids")
    pad = "a<|image_pad|>b"
    assert await rig.refused(Prompt(text=pad)) == ("invalid_request", "prompt")


async def test_a_question_of_a_tenant_that_is_none_is_refused(rig: Rig) -> None:
    question = json.dumps({"prompt": "a"}).encode()
    answer = await rig.bus.request(
        subjects.renderer("tokenize", rig.model), question, 5.0, "not a name"
    )
    assert msgspec.json.decode(answer)["error"]["field"] == "Pagemill-Tenant"
