"""Malformed requests that no renderer would produce: rows S28 to S30 and S32."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from torch import Tensor

from ops.rendering import render
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import (
    DecodeError,
    InvalidRequest,
    PagemillError,
    RequestError,
    UnsupportedContent,
)
from shared.models.media import DecodedImage
from shared.models.tower import Tower
from shared.models.tower_adapter import Fields
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.requests import ContentPart, ImagePart, ImageURL, Message, TextPart
from tests.request_path import pack, run, unpack
from tests.shared.codec.test_envelope import envelope, packed
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, Item
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.renderer.processing.processor import Processor
from workers.settings import DEMO_MODEL

MODEL = ModelConfig(str(DEMO_MODEL), max_model_len=512)


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(MODEL)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    engine = EngineConfig(num_blocks=128, prefix_caching=False, embedding_cache_mib=0)
    return build_core(load(MODEL, engine), engine)


def message(
    processor: Processor, request_id: str = "r", colours: tuple[str, ...] = ("red",)
) -> bytes:
    """An engine task as the renderer publishes it."""
    parts: list[ContentPart] = [ImagePart(ImageURL("data:,")) for _ in colours]
    parts.append(TextPart("What color is this image?"))
    images = [DecodedImage(Image.new("RGB", (90, 70), colour), colour) for colour in colours]
    return pack(render(processor, [Message("user", parts)], images), request_id)


@pytest.fixture
def good(processor: Processor) -> EngineRequest:
    return unpack(message(processor))


def with_item(request: EngineRequest, **changes: Any) -> EngineRequest:
    """The request with its first item changed; `fields` that are None are dropped."""
    item = request.items[0]
    fields = item.fields | changes.pop("fields", {})
    fields = {name: value for name, value in fields.items() if value is not None}
    return replace(request, items=[replace(item, fields=fields, **changes), *request.items[1:]])


def patches(rows: int = 0, channels: int = 3, pixels: int = 196) -> Tensor:
    return torch.zeros(rows, channels, pixels, dtype=torch.uint8)


def table(value: float) -> Tensor:
    spoilt = torch.zeros(3, 256)
    spoilt[2, 255] = value
    return spoilt


Change = Callable[[Item], dict[str, Tensor | None]]


def patches_of(dtype: torch.dtype) -> Change:
    return lambda item: {"pixel_patches": item.fields["pixel_patches"].to(dtype)}


def grid_of(grid: list[Any]) -> Change:
    return lambda item: {"image_grid_thw": torch.tensor(grid)}


FIELDS: dict[str, Change] = {
    "no patches": lambda item: {"pixel_patches": None},
    "no table": lambda item: {"pixel_table": None},
    "no grid": lambda item: {"image_grid_thw": None},
    **{
        f"patches of {dtype}": patches_of(dtype)
        for dtype in (torch.int8, torch.bool, torch.int16, torch.float16, torch.float32)
    },
    "complex patches": lambda item: {
        "pixel_patches": item.fields["pixel_patches"].to(torch.complex64)
    },
    "sparse patches": lambda item: {
        "pixel_patches": item.fields["pixel_patches"].to_sparse().to(torch.float32)
    },
    "one row too few": lambda item: {"pixel_patches": item.fields["pixel_patches"][:-1]},
    "one row too many": lambda item: {
        "pixel_patches": patches(len(item.fields["pixel_patches"]) + 1)
    },
    "no rows": lambda item: {"pixel_patches": patches(0)},
    "one pixel too few": lambda item: {"pixel_patches": item.fields["pixel_patches"][..., :-1]},
    "a channel too many": lambda item: {
        "pixel_patches": patches(len(item.fields["pixel_patches"]), channels=4)
    },
    "flat patches": lambda item: {"pixel_patches": item.fields["pixel_patches"].flatten()},
    "a further dimension": lambda item: {"pixel_patches": item.fields["pixel_patches"][None]},
    "a scalar": lambda item: {"pixel_patches": torch.tensor(1, dtype=torch.uint8)},
    "a table with NaN": lambda item: {"pixel_table": table(torch.nan)},
    "a table with infinity": lambda item: {"pixel_table": table(torch.inf)},
    "a table with minus infinity": lambda item: {"pixel_table": table(-torch.inf)},
    "a double table": lambda item: {"pixel_table": item.fields["pixel_table"].double()},
    "a short table": lambda item: {"pixel_table": item.fields["pixel_table"][:, :255]},
    "a table of one channel": lambda item: {"pixel_table": item.fields["pixel_table"][:1]},
    "an empty table": lambda item: {"pixel_table": torch.zeros(0, 256)},
    **{
        f"a grid of {grid}": grid_of(grid)
        for grid in (
            [1, 2**62, 4],
            [1, 2**32, 2**32],
            [2**63 - 1, 1, 1],
            [1, -6, -4],
            [0, 6, 4],
            [2, 6, 4],
            [1, 0, 0],
            [1, 1, 24],
            [1, 3, 8],
            [1, 6],
            [1, 6, 4, 1],
            [],
            [[1, 6, 4]],
        )
    },
    "a grid of floats": lambda item: {"image_grid_thw": torch.tensor([1.0, 6.0, 4.0])},
    "a grid of int32": lambda item: {"image_grid_thw": item.fields["image_grid_thw"].int()},
}


@pytest.fixture
def tower_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of items in the calls of the tower."""
    encode, calls = Tower.encode, list[int]()

    def watched(self: Tower, batch: Sequence[Fields]) -> list[Tensor]:
        calls.append(len(batch))
        return encode(self, batch)

    monkeypatch.setattr(Tower, "encode", watched)
    return calls


def test_a_valid_request_is_served(
    core: EngineCore, good: EngineRequest, tower_calls: list[int]
) -> None:
    answers, errors = run(core, [good])
    assert answers["r"]
    assert errors == {}
    assert tower_calls == [1]


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_another_kind_or_shape_never_reach_the_model(
    core: EngineCore, good: EngineRequest, tower_calls: list[int], name: str
) -> None:
    spoilt = with_item(good, fields=FIELDS[name](good.items[0]))
    answers, errors = run(core, [spoilt])
    assert type(errors["r"]) is InvalidRequest
    assert errors["r"].field == "items"
    assert answers == {"r": []}
    assert tower_calls == []


@pytest.mark.parametrize(
    ("modality", "error"),
    [
        ("video", InvalidRequest),  # The model takes videos, but has no places for one here.
        ("audio", UnsupportedContent),
        ("", UnsupportedContent),
        ("Image", UnsupportedContent),
    ],
)
def test_another_modality_is_rejected(
    core: EngineCore, good: EngineRequest, modality: str, error: type[PagemillError]
) -> None:
    _, errors = run(core, [with_item(good, modality=modality)])
    assert type(errors["r"]) is error


# -- S30: as many embeddings as places ------------------------------------------------------------


def move(request: EngineRequest, offset: int = 0, length: int = 0) -> EngineRequest:
    placeholder = request.items[0].placeholder
    return with_item(
        request,
        placeholder=PlaceholderRange(placeholder.offset + offset, placeholder.length + length),
    )


WRONG: dict[str, Callable[[EngineRequest], EngineRequest]] = {
    "one place too few": lambda request: move(request, 0, -1),
    "one place too many": lambda request: move(request, 0, 1),
    "one further on": lambda request: move(request, 1, 0),
    "one before": lambda request: move(request, -1, 0),
    "over a word": lambda request: move(request, -1, 1),
    "a larger picture": lambda request: with_item(
        request,
        fields={"pixel_patches": patches(400), "image_grid_thw": torch.tensor([1, 20, 20])},
    ),
    "a smaller picture": lambda request: with_item(
        request, fields={"pixel_patches": patches(4), "image_grid_thw": torch.tensor([1, 2, 2])}
    ),
    "no picture for its places": lambda request: with_item(request, fields={"pixel_patches": None}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_with_too_few_embeddings_fails_alone(
    core: EngineCore, processor: Processor, name: str
) -> None:
    colours = ("red", "blue", "green", "yellow", "black", "white", "red")
    others = [unpack(message(processor, f"r{i}", (c,))) for i, c in enumerate(colours)]
    alone, _ = run(core, others)
    bad = WRONG[name](unpack(message(processor, "bad")))
    answers, errors = run(core, [*others[:3], bad, *others[3:]])
    assert set(errors) == {"bad"}
    assert isinstance(errors["bad"], InvalidRequest)
    assert answers == alone | {"bad": []}


@pytest.mark.parametrize("placeholder", [(-1, 4), (0, 0), (0, -1), (10**9, 4), (0, 2**62)])
def test_placeholders_outside_of_the_prompt_are_rejected_by_add(
    core: EngineCore, good: EngineRequest, placeholder: tuple[int, int]
) -> None:
    with pytest.raises(InvalidRequest, match="placeholder"):
        core.add(with_item(good, placeholder=PlaceholderRange(*placeholder)))
    assert not core.has_work


# -- S32: token ids -------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [-1, 10**9, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", [0, 3, -1])
def test_token_ids_out_of_range_are_rejected_by_add(
    core: EngineCore, good: EngineRequest, token_id: int, place: int
) -> None:
    token_ids = [1, 2, 3, 4, 5]
    token_ids[place] = token_id
    with pytest.raises(InvalidRequest) as caught:
        core.add(EngineRequest("r", token_ids, [], good.sampling))
    assert caught.value.field == "messages"
    assert not core.has_work


def test_the_first_id_out_of_range_is_the_vocabularys_size(
    core: EngineCore, good: EngineRequest
) -> None:
    config = msgspec.json.decode((DEMO_MODEL / "config.json").read_bytes())
    size = config["text_config"]["vocab_size"]
    with pytest.raises(InvalidRequest, match=f"from 0 to {size - 1}"):
        core.add(EngineRequest("r", [size], [], good.sampling))
    answers, errors = run(core, [EngineRequest("r", [size - 1], [], good.sampling)])
    assert answers["r"]
    assert errors == {}


@pytest.mark.parametrize("token_ids", [[True], [1.0], ["1"], [None], [b"1"], [[1]], "12", None, {}])
def test_invalid_token_ids_are_rejected_before_decoding(
    processor: Processor, token_ids: Any
) -> None:
    task = msgspec.to_builtins(msgspec.msgpack.decode(_head(message(processor))))
    body = task["body"] | {"items": []}
    assert unpack(envelope(packed([], task | {"body": body}))).prompt_token_ids
    body["prompt_token_ids"] = token_ids
    with pytest.raises(DecodeError, match="prompt_token_ids"):
        unpack(envelope(packed([], task | {"body": body})))


def _head(data: bytes) -> bytes:
    _, head = msgspec.msgpack.decode(
        data[16 : 16 + int.from_bytes(data[8:12], "little")],
        type=tuple[list[Any], msgspec.Raw],
    )
    return bytes(head)


def test_an_empty_prompt_is_rejected_by_add(core: EngineCore, good: EngineRequest) -> None:
    with pytest.raises(RequestError):
        core.add(EngineRequest("r", [], [], good.sampling))
    assert not core.has_work


# -- S29: received tensors are only read -----------------------------------------------------------


def test_the_engine_does_not_write_to_received_tensors(
    core: EngineCore, processor: Processor
) -> None:
    """The memory of this envelope may be written, so a write would show."""
    received = bytearray(message(processor, colours=("red", "blue")))
    before = hashlib.sha256(received).digest()
    request = unpack(received)
    tensors = [tensor for item in request.items for tensor in item.fields.values()]
    start = torch.frombuffer(received, dtype=torch.uint8).data_ptr()
    assert all(start <= t.data_ptr() < start + len(received) for t in tensors)
    answers, errors = run(core, [request])
    assert answers["r"]
    assert errors == {}
    assert hashlib.sha256(received).digest() == before
    assert [tensor._version for tensor in tensors] == [0] * len(tensors)


def test_the_renderers_table_is_not_changed(core: EngineCore, processor: Processor) -> None:
    """All images share the table."""
    first = message(processor)
    run(core, [unpack(first)])
    assert message(processor) == first
