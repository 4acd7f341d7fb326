"""Processed media in the format of vLLM's render and generate endpoints.

An item is msgpack: a map from field names to `{"data": tensor, "field": [kind, arguments]}`. A
tensor is `[dtype, shape, bytes]`, with the bytes in C order and little endian in an extension of
type 3. The kind determines how a server batches items. Extensions of types 1 and 2 are pickles, and
decoding them would execute untrusted code. Everything except tensors is refused.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Meta, Struct
from numpy.typing import NDArray

from shared.codec.envelope import ITEM_BYTES, MAX_DIMS, DType, TensorData
from shared.errors import InvalidRequest
from shared.helpers.validation import reason_of

MAX_FIELDS = 16
MAX_SLICES = 64
MAX_NUMBERS = 4096
_RAW_VIEW = 3

_Size = Annotated[int, Meta(ge=0)]

Samples = NDArray[np.float32]
"""One channel of a sound, at the model's sample rate."""

Bounds = list[int | None]
"""Start, stop and step of a slice."""
Slices = list[list[int | Bounds | None]]
"""Position of each item in the batch: the bounds of one dimension or of several."""


class BatchedField(Struct, frozen=True, forbid_unknown_fields=True):
    """A field with one row of the batch for each item."""

    keep_on_cpu: bool = False


class FlatField(Struct, frozen=True, forbid_unknown_fields=True):
    """A field that concatenates the items along `dim`."""

    slices: Slices
    dim: _Size = 0
    keep_on_cpu: bool = False


class SharedField(Struct, frozen=True, forbid_unknown_fields=True):
    """A field that is equal for all items."""

    batch_size: _Size
    keep_on_cpu: bool = False


Kind = BatchedField | FlatField | SharedField
_KINDS: dict[str, type[Kind]] = {"batched": BatchedField, "flat": FlatField, "shared": SharedField}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class WireField:
    """One field of an item: its tensor, and the kind of its batching."""

    tensor: TensorData
    kind: Kind
    is_list: bool = False
    """Whether it is written as a list of numbers. The tensor then has one dimension of float64."""


def encode_item(fields: Mapping[str, WireField]) -> bytes:
    """Encode an item byte for byte as vLLM does, with its fields in the order of `fields`."""
    return msgspec.msgpack.encode(
        {
            name: {"data": _pack_data(field), "field": _pack_kind(field.kind)}
            for name, field in fields.items()
        }
    )


def metadata_of(fields: Mapping[str, WireField]) -> dict[str, WireField]:
    """Return the fields that the language model needs, even if another server encodes the item."""
    return {name: field for name, field in fields.items() if field.kind.keep_on_cpu}


def decode_item(data: bytes, field: str) -> dict[str, WireField]:
    """Decode an item. Its tensors are views into `data`.

    Raises InvalidRequest naming `field`, and no other error, for any other bytes.
    """
    try:
        elements = _item.decode(data)
        return {name: _unpack_field(element) for name, element in elements.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"not the data of an item: {reason_of(error)}", field=field) from error


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Properties of a video that vLLM's mm_hash covers, in addition to its file."""

    num_frames: int
    """Number of frames in the file."""
    fps: float
    indexes: tuple[int, ...]
    """Indexes of the sampled frames."""
    is_sequence: bool
    """Whether the file is a sequence of JPEG files: their base64 with commas between them."""
    use_audio: bool = False
    """Whether the sound is used as well."""


def mm_hash(
    modality: str, source: bytes | Samples, model_id: str, video: VideoFacts | None = None
) -> str:
    """Return vLLM's mm_hash, with its default algorithm, of a medium that was fetched or sent as a
    file. `source` is the file of an image or a video, or the resampled samples of a sound.
    `model_id` is the model name with which vLLM's servers were started.

    In some cases vLLM hashes the pixels instead, and its hash differs: for an image that is not
    RGB, or has a UUID as its EXIF ImageID, and for a video with sampled frames that are smaller
    together than its file.
    """
    if isinstance(source, bytes):
        leaf = _LEAF + _frame(modality.encode()) + _LEAF + _frame(source)
    else:
        leaf = _hash_samples(source)
    leaves = {"model_id": _LEAF + _frame(model_id.encode())}
    if video is not None:
        leaf = _SEQUENCE + _length(2) + leaf + _hash_facts(video)
        if video.use_audio:
            kwargs = {b"use_audio_in_video": _LEAF + _frame(b"\1")}
            leaves["mm_processor_kwargs"] = _mapping(kwargs)
    leaves[modality] = leaf
    digest = blake3()
    for name in sorted(leaves):
        digest.update(_frame(name.encode()) + leaves[name])
    return digest.hexdigest()


_SEQUENCE, _MAPPING, _LEAF = b"\x01", b"\x02", b"\x03"


def _hash_facts(video: VideoFacts) -> bytes:
    """Return the hash input of a video's facts: numbers have 8 bytes as in numpy, and bools one."""
    indexes = b"".join(_LEAF + _frame(struct.pack("<q", index)) for index in video.indexes)
    backend = b"jpeg_sequence" if video.is_sequence else b"opencv"
    values = {
        b"total_num_frames": _LEAF + _frame(struct.pack("<q", video.num_frames)),
        b"fps": _LEAF + _frame(struct.pack("<d", video.fps)),
        b"duration": _LEAF + _frame(struct.pack("<d", video.num_frames / video.fps)),
        b"video_backend": _LEAF + _frame(backend),
        b"frames_indices": _SEQUENCE + _length(len(video.indexes)) + indexes,
        b"do_sample_frames": _LEAF + _frame(b"\0"),
    }
    return _mapping(values)


def _hash_samples(samples: Samples) -> bytes:
    values = {
        b"dtype": _LEAF + _frame(b"<f4"),
        b"shape": _SEQUENCE + _length(1) + _LEAF + _frame(struct.pack("<q", len(samples))),
        b"data": _LEAF + _frame(samples.astype("<f4", copy=False).tobytes()),
    }
    return _LEAF + _frame(b"ndarray") + _mapping(values)


def _mapping(values: Mapping[bytes, bytes]) -> bytes:
    pairs = b"".join(_frame(name) + value for name, value in values.items())
    return _MAPPING + _length(len(values)) + pairs


def _length(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _frame(data: bytes) -> bytes:
    return _length(len(data)) + data


def _pack_data(field: WireField) -> list[Any]:
    tensor = field.tensor
    if field.is_list:
        return [value for (value,) in struct.iter_unpack("<d", tensor.data)]
    raw = msgspec.msgpack.Ext(_RAW_VIEW, tensor.data)
    return [tensor.dtype, tensor.shape, raw]


def _pack_kind(kind: Kind) -> list[Any]:
    # vLLM writes the flag first.
    return [_NAMES[type(kind)], {"keep_on_cpu": kind.keep_on_cpu} | msgspec.structs.asdict(kind)]


# ---------------------------------------------------------------------------------------------
# Decoding: every level has a type, so that no bytes can make the decoder recurse deeper.

_Argument = bool | int | Annotated[list[list[int | Bounds | None]], Meta(max_length=MAX_SLICES)]


class _Element(Struct, frozen=True, forbid_unknown_fields=True):
    data: msgspec.Raw
    field: tuple[Literal["batched", "flat", "shared"], dict[str, _Argument]]


_Tensor = tuple[DType, Annotated[list[_Size], Meta(max_length=MAX_DIMS)], msgspec.msgpack.Ext]
_tensor = msgspec.msgpack.Decoder(_Tensor)
_numbers = msgspec.msgpack.Decoder(Annotated[list[float], Meta(max_length=MAX_NUMBERS)])
_item = msgspec.msgpack.Decoder(
    Annotated[
        dict[Annotated[str, Meta(max_length=128)], _Element],
        Meta(min_length=1, max_length=MAX_FIELDS),
    ]
)


def _unpack_field(element: _Element) -> WireField:
    name, arguments = element.field
    kind = msgspec.convert(arguments, _KINDS[name])
    try:
        dtype, shape, payload = _tensor.decode(element.data)
    except msgspec.ValidationError:
        try:
            numbers = _numbers.decode(element.data)
        except msgspec.ValidationError:
            numbers = []
        if not numbers:
            raise
        packed = memoryview(struct.pack(f"<{len(numbers)}d", *numbers))
        return WireField(TensorData("float64", (len(numbers),), packed), kind, is_list=True)
    if payload.code != _RAW_VIEW:
        raise ValueError(f"an extension of type {payload.code} is not a tensor's data")
    data = memoryview(payload.data)
    if math.prod(shape) * ITEM_BYTES[dtype] != data.nbytes:
        raise ValueError(f"{dtype} {shape} does not have {data.nbytes} bytes")
    if dtype == "bool" and bytes(data).strip(b"\0\1"):
        raise ValueError("a bool tensor has bytes other than 0 and 1")
    return WireField(TensorData(dtype, tuple(shape), data), kind)
