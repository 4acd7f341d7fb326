"""Images of other servers: what we give them, what we take, and what we do not."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.tensors import from_torch
from shared.codec.vllm_kwargs import BatchedField, FlatField, WireField, decode_item, encode_item
from shared.config.schema import ModelConfig, RendererConfig
from shared.errors import InvalidRequest, MediaTooLarge, UnsupportedContent
from shared.models.wire_pixels import to_pixels
from shared.protocol.multimodal import IMAGE
from shared.protocol.requests import Feature, Prompt
from tests import llava
from tests.renderer.processing.test_processor import TEXT, TEXT_TEMPLATE, write_model
from workers.renderer.media.image_decoder import decode_image
from workers.renderer.processing.processor import ProcessedImage, Processor
from workers.settings import DEMO_MODEL

FILE = (Path(__file__).parents[2] / "recorded" / "112x56.png").read_bytes()
# Hash of the 37,798 bytes that vLLM 0.32.0 makes from this file.
RECORDED = "2ad50ecb8e7ea1170ab09cd02da63bd568df0f505f0340fd75b14a8fb88ed402"
FIELD = "features.kwargs_data.image[0]"


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(ModelConfig(str(DEMO_MODEL)))


def image_of(processor: Processor, file: bytes = FILE) -> ProcessedImage:
    return processor.process(decode_image(file, RendererConfig(), FIELD), FIELD, "")


def same(ours: ProcessedImage, theirs: ProcessedImage) -> bool:
    """Return whether an engine restores the same pixels for both."""
    return restored(ours) == restored(theirs) and ours.num_tokens == theirs.num_tokens


def restored(image: ProcessedImage) -> dict[str, bytes]:
    fields = dict(image.fields)
    table = to_numpy(fields.pop("pixel_table"))
    name = "pixel_patches" if "pixel_patches" in fields else "pixels"
    pixels = to_numpy(fields.pop(name))
    channels = np.arange(3)[:, None] if name == "pixel_patches" else np.arange(3)[:, None, None]
    rest = {key: bytes(tensor.data) for key, tensor in fields.items()}
    return rest | {"pixels": table[channels, pixels].tobytes()}


def test_our_item_is_vllms_to_the_byte(processor: Processor) -> None:
    item, metadata = processor.encode_item(image_of(processor))
    assert metadata is not None
    assert (len(item), len(metadata)) == (37_798, 87)
    assert hashlib.sha256(item).hexdigest() == RECORDED


def test_our_item_comes_back(processor: Processor) -> None:
    ours = image_of(processor)
    item, _ = processor.encode_item(ours)
    assert processor.decode_item(IMAGE, item, ours.mm_hash, FIELD) == ours


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_normalised_values_are_restored_bit_for_bit(processor: Processor, dtype: str) -> None:
    """Items of servers that normalise on the CPU, in any precision."""
    ours = image_of(processor)
    wire = decode_item(processor.encode_item(ours)[0], FIELD)
    rows = to_numpy(wire["pixel_values"].tensor).reshape(32, 3, 2, 196)
    table = to_numpy(ours.fields["pixel_table"])
    values = table[np.arange(3)[:, None, None], rows].reshape(32, 1176)
    cast = torch.from_numpy(values).to(getattr(torch, dtype))
    field = WireField(from_torch(cast), FlatField([[[0, 32, None]]]))
    theirs = processor.decode_item(IMAGE, encode_item(wire | {"pixel_values": field}), "h", FIELD)
    patches, own = to_numpy(theirs.fields["pixel_patches"]), to_numpy(theirs.fields["pixel_table"])
    expected = cast.float().numpy().reshape(32, 3, 2, 196)[:, :, 0]
    assert np.array_equal(own[np.arange(3)[:, None], patches], expected)
    if dtype == "float32":
        assert same(ours, theirs)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_values_are_found_in_their_table(values: list[float]) -> None:
    array = np.array(values, np.float32).reshape(1, 1, -1)
    if len(np.unique(array)) > 256:
        return
    pixels, table = to_pixels(array, from_numpy(np.zeros((1, 256), np.float32)), FIELD)
    assert np.array_equal(to_numpy(table)[0][pixels], array)


def item_of(grid: object = (1, 4, 8), rows: np.ndarray | None = None, **more: WireField) -> bytes:
    tensor = np.zeros((32, 1176), np.uint8) if rows is None else rows
    fields = {
        "image_grid_thw": WireField(from_numpy(np.array(grid, np.int64)), BatchedField(True)),
        "pixel_values": WireField(from_numpy(tensor), FlatField([[[0, len(tensor), None]]])),
    }
    return encode_item(fields | more)


def noise(dtype: str) -> np.ndarray:
    frame = np.random.default_rng(0).normal(size=(32, 3, 1, 196)).astype(dtype)
    return np.repeat(frame, 2, axis=2).reshape(32, 1176)


def frames_apart() -> np.ndarray:
    rows = np.zeros((32, 1176), np.uint8)
    rows[7, 196] = 1
    return rows


WRONG: dict[str, Callable[[], bytes]] = {
    "grid of other patches": lambda: item_of((1, 4, 6)),
    "grid of no patches": lambda: item_of((1, 0, 8), np.zeros((0, 1176), np.uint8)),
    "negative grid": lambda: item_of((1, -4, -8)),
    "huge grid": lambda: item_of((1, 2**62, 2**62)),
    "grid that does not merge": lambda: item_of((1, 1, 32)),
    "two frames": lambda: item_of((2, 4, 4)),
    "grid of two": lambda: item_of((4, 8)),
    "grid of floats": lambda: item_of(
        image_grid_thw=WireField(from_numpy(np.array([1.0, 4.0, 8.0])), BatchedField(True))
    ),
    "short rows": lambda: item_of(rows=np.zeros((32, 1175), np.uint8)),
    "rows in three dimensions": lambda: item_of(rows=np.zeros((32, 3, 392), np.uint8)),
    "frames that differ": lambda: item_of(rows=frames_apart()),
    "no picture of 8 bits": lambda: item_of(rows=noise("float32")),
    "not a number": lambda: item_of(rows=np.full((32, 1176), np.nan, np.float32)),
    "infinite": lambda: item_of(rows=np.full((32, 1176), np.inf, np.float16)),
    "whole numbers": lambda: item_of(rows=np.zeros((32, 1176), np.int32)),
    "another field": lambda: item_of(other=WireField(from_numpy(np.zeros(1)), BatchedField())),
    "a field too few": lambda: encode_item(
        {"pixel_values": WireField(from_numpy(np.zeros(1)), BatchedField())}
    ),
    "garbage": lambda: b"garbage",
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_tensors_that_are_no_image_of_the_model_are_refused(
    processor: Processor, wrong: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        processor.decode_item(IMAGE, WRONG[wrong](), "h", FIELD)
    assert caught.value.field == FIELD


def test_a_llava_image_travels_as_its_values(tmp_path: Path) -> None:
    llava.write_processor(tmp_path)
    processor = Processor(ModelConfig(str(tmp_path)))
    ours = image_of(processor)
    item, metadata = processor.encode_item(ours)
    (field,) = decode_item(item, FIELD).values()
    assert (field.tensor.dtype, field.kind, metadata) == ("float32", BatchedField(), None)
    assert same(processor.decode_item(IMAGE, item, ours.mm_hash, FIELD), ours)
    small = replace(field.tensor, shape=(3, 1, field.tensor.shape[1] * field.tensor.shape[2]))
    with pytest.raises(InvalidRequest):
        processor.decode_item(
            IMAGE, encode_item({"pixel_values": WireField(small, BatchedField())}), "h", FIELD
        )


# ---------------------------------------------------------------------------------------------
# places in the prompt


def prompt_with(processor: Processor, *places: tuple[int, int], length: int = 20) -> Prompt:
    pad = processor.placeholder_ids[IMAGE]
    ids = [pad if 4 <= i < 8 or 10 <= i < 14 else 1 for i in range(length)]
    return Prompt(token_ids=ids, features=[Feature("image", "h", *place) for place in places])


def test_places_are_where_the_features_say(processor: Processor) -> None:
    ranges = processor.check_features(prompt_with(processor, (4, 4), (10, 4)))
    assert [(r.offset, r.length) for r in ranges] == [(4, 4), (10, 4)]
    assert processor.check_features(prompt_with(processor)) == []


@pytest.mark.parametrize(
    ("places", "number"),
    [
        ([(3, 4)], 0),
        ([(4, 5)], 0),
        ([(4, 4), (6, 2)], 1),
        ([(10, 4), (4, 4)], 1),
        ([(4, 4), (4, 4)], 1),
        ([(4, 4), (12, 100)], 1),
        ([(2**40, 1)], 0),
        ([(10, 2**62)], 0),
    ],
)
def test_places_that_are_none_are_refused(
    processor: Processor, places: list[tuple[int, int]], number: int
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        processor.check_features(prompt_with(processor, *places))
    assert caught.value.field == f"features.mm_placeholders.image[{number}]"


def test_images_are_counted(processor: Processor) -> None:
    with pytest.raises(MediaTooLarge):
        processor.check_features(prompt_with(processor, *[(4, 1)] * 9))


def test_a_model_that_does_not_see_takes_none(tmp_path: Path) -> None:
    processor = Processor(ModelConfig(str(write_model(tmp_path, TEXT, TEXT_TEMPLATE))))
    feature = Feature("image", "h", 0, 1)
    with pytest.raises(UnsupportedContent) as caught:
        processor.check_features(Prompt(token_ids=[1, 2], features=[feature]))
    assert caught.value.field == "features"
