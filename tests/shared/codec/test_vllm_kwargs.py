"""Items compared with bytes recorded from a vLLM server, and invalid items."""

import contextlib
import math
import struct
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from shared.codec.envelope import ITEM_BYTES, TensorData
from shared.codec.vllm_kwargs import (
    BatchedField,
    FlatField,
    Kind,
    SharedField,
    WireField,
    decode_item,
    encode_item,
    metadata_of,
    mm_hash,
)
from shared.errors import InvalidRequest

GRID = struct.pack("<3q", 1, 4, 8)
PIXELS = bytes(range(256)) * 147
FIELDS = {
    "image_grid_thw": WireField(
        TensorData("int64", (3,), memoryview(GRID)), BatchedField(keep_on_cpu=True)
    ),
    "pixel_values": WireField(
        TensorData("uint8", (32, 1176), memoryview(PIXELS)), FlatField([[[0, 32, None]]])
    ),
}
# An image of 112 x 56, as written by vLLM 0.32.0.
RECORDED_GRID = (
    b"\xaeimage_grid_thw\x82\xa4data\x93\xa5int64\x91\x03\xc7\x18\x03"
    + GRID
    + b"\xa5field\x92\xa7batched\x81\xabkeep_on_cpu\xc3"
)
RECORDED = (
    b"\x82"
    + RECORDED_GRID
    + b"\xacpixel_values\x82\xa4data\x93\xa5uint8\x92\x20\xcd\x04\x98\xc8\x93\x00\x03"
    + PIXELS
    + b"\xa5field\x92\xa4flat\x83\xabkeep_on_cpu\xc2\xa6slices\x91\x91\x93\x00\x20\xc0\xa3dim\x00"
)


def test_an_item_is_encoded_as_by_vllm() -> None:
    assert encode_item(FIELDS) == RECORDED
    assert len(RECORDED) == 37_798
    assert encode_item(metadata_of(FIELDS)) == b"\x81" + RECORDED_GRID


def test_a_vllm_item_is_decoded() -> None:
    assert decode_item(RECORDED, "f") == FIELDS
    assert list(decode_item(RECORDED, "f")) == list(FIELDS)


kinds = st.one_of(
    st.builds(BatchedField, st.booleans()),
    st.builds(
        FlatField,
        st.lists(
            st.one_of(
                st.lists(st.none() | st.integers(0, 2**40), min_size=3, max_size=3),
                st.lists(st.lists(st.none() | st.integers(0, 9), min_size=3, max_size=3)),
            ),
            max_size=3,
        ),
        st.integers(0, 7),
        st.booleans(),
    ),
    st.builds(SharedField, st.integers(0, 2**31), st.booleans()),
)


@st.composite
def fields(draw: st.DrawFn) -> WireField:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    size = math.prod(shape) * ITEM_BYTES[dtype]
    data = bytes(size) if dtype == "bool" else draw(st.binary(min_size=size, max_size=size))
    return WireField(TensorData(dtype, shape, memoryview(data)), draw(kinds))


items = st.dictionaries(st.text(max_size=40), fields(), min_size=1, max_size=5)


@given(items)
def test_items_round_trip_to_the_byte(item: dict[str, WireField]) -> None:
    data = encode_item(item)
    decoded = decode_item(data, "f")
    assert decoded == item
    assert encode_item(decoded) == data


def packed(
    data: object = ("uint8", [1], msgspec.msgpack.Ext(3, b"x")),
    field: object = ("batched", {"keep_on_cpu": False}),
    **more: object,
) -> bytes:
    return msgspec.msgpack.encode({"a": {"data": data, "field": field} | more})


def ext(code: int, data: bytes = b"x") -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


NESTED: object = 1
for _ in range(5000):
    NESTED = [NESTED]
DEEP = b"\x91" * 100_000

HOSTILE = [
    b"",
    b"\xc1",
    b"\x01",
    b"\x80",
    RECORDED[:-1],
    RECORDED + b"\x00",
    RECORDED.replace(b"uint8", b"uint9"),
    b"\x81\xa1a\x82\xa4data" + DEEP,
    b"\x81\xa1a\x82\xa5field\x92\xa4flat\x81\xa6slices" + DEEP,
    DEEP,
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa1a" + b"\xdd\xff\xff\xff\xff",
    packed(("uint8", [1], ext(1))),
    packed(("uint8", [1], ext(2))),
    packed(("uint8", [1], ext(-1, bytes(4)))),
    packed(("uint8", [1], 1)),
    packed(("uint8", [1], b"x")),
    packed(("uint8", [2], ext(3))),
    packed(("uint8", [-1], ext(3))),
    packed(("uint8", [2**63, 2**63], ext(3))),
    packed(("uint8", [1] * 9, ext(3))),
    packed(("int64", [1], ext(3))),
    packed(("bool", [1], ext(3, b"\x02"))),
    packed(1),
    packed(None),
    packed([("uint8", [1], ext(3))]),
    packed(field=("other", {})),
    packed(field=("flat", {})),
    packed(field=("flat", {"slices": [[[[0]]]]})),
    packed(field=("flat", {"slices": [], "dim": -1})),
    packed(field=("shared", {"batch_size": True})),
    packed(field=("batched", {"keep_on_cpu": 1})),
    packed(field=("batched", {"other": 1})),
    packed(more=1),
    msgspec.msgpack.encode({str(i): 1 for i in range(100)}),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_invalid_items_are_refused_with_their_field(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_item(data, "features.kwargs_data.image[3]")
    assert caught.value.field == "features.kwargs_data.image[3]"


@given(st.binary(max_size=200) | st.builds(RECORDED[:200].__add__, st.binary(max_size=50)))
def test_random_bytes_raise_no_other_error(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        decode_item(data, "f")


def framed(*parts: bytes) -> bytes:
    return b"".join(
        struct.pack("<Q", len(part)) + part if part != b"\x03" else part for part in parts
    )


@pytest.mark.parametrize(
    ("modality", "order"), [("image", ("image", "model_id")), ("video", ("model_id", "video"))]
)
def test_a_hash_covers_the_frames_in_the_order_of_their_names(
    modality: str, order: tuple[str, str]
) -> None:
    frames = {
        "model_id": framed(b"model_id", b"\x03", b"models/tiny-qwen2vl"),
        modality: framed(modality.encode(), b"\x03", modality.encode(), b"\x03", b"a file"),
    }
    expected = blake3(b"".join(frames[name] for name in order)).hexdigest()
    assert mm_hash(modality, b"a file", "models/tiny-qwen2vl") == expected


def test_the_hash_equals_the_recorded_one() -> None:
    file = (Path(__file__).parents[2] / "recorded" / "112x56.png").read_bytes()
    expected = "26fb6b12ccc5f3fa40dba9d4d47abe414e8e1d3ae63ef45b176c1cba98b0722e"
    assert mm_hash("image", file, "models/tiny-qwen2vl") == expected


def test_field_kinds_decode_to_their_types() -> None:
    kind: Kind = decode_item(packed(field=("shared", {"batch_size": 2})), "f")["a"].kind
    assert kind == SharedField(2)
