"""Processed pictures as vLLM's render and generate endpoints exchange them. Pure.

An item is msgpack: a map from field names to `{"data": tensor, "field": [kind, arguments]}`. A
tensor is `[dtype, shape, bytes]`, the bytes C order and little endian in an extension of type 3;
the kind says how a server puts the items of a batch together. Types 1 and 2 are pickles: whoever
reads these runs what a stranger has written. Here they are refused like all else that no tensor is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from shared.codec.envelope import ITEM_BYTES, MAX_DIMS, DType, TensorData
from shared.errors import InvalidRequest

MAX_FIELDS = 16
MAX_SLICES = 64
_RAW_VIEW = 3

Bounds = list[int | None]
"""Start, stop and step."""
Slices = list[list[int | Bounds | None]]
"""Of each item of a batch where it is in the whole: its bounds, or those of several dimensions."""


@dataclass(frozen=True, slots=True)
class BatchedField:
    """The item is a row of the batch."""

    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class FlatField:
    """The items follow each other along `dim`."""

    slices: Slices
    dim: int = 0
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class SharedField:
    """The same for all items."""

    batch_size: int
    keep_on_cpu: bool = False


Kind = BatchedField | FlatField | SharedField


@dataclass(frozen=True, slots=True)
class WireField:
    tensor: TensorData
    kind: Kind


def encode_item(fields: Mapping[str, WireField]) -> bytes:
    """As vLLM writes it, to the byte; its fields are in the order of `fields`."""
    return msgspec.msgpack.encode(
        {
            name: {"data": _packed(field.tensor), "field": _packed_kind(field.kind)}
            for name, field in fields.items()
        }
    )


def metadata_of(fields: Mapping[str, WireField]) -> dict[str, WireField]:
    """What the language model needs to know of a picture, whoever encodes it."""
    return {name: field for name, field in fields.items() if field.kind.keep_on_cpu}


def decode_item(data: bytes, field: str) -> dict[str, WireField]:
    """An item whose fields are tensors, views into `data`.

    Raises InvalidRequest naming `field`, and nothing else, for whatever other bytes.
    """
    try:
        elements = _item.decode(data)
        return {name: _unpacked(element) for name, element in elements.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"not the data of a picture: {error}", field=field) from error


def mm_hash(modality: str, file: bytes, model_id: str) -> str:
    """By what vLLM knows a picture that was fetched or sent as a file, with its default algorithm;
    `model_id` is the model as its servers were told of it.

    It hashes what else decides about the pixels too: a picture that is not RGB, or one with a UUID
    as its EXIF ImageID, has another hash there.
    """
    leaves = {modality: _LEAF + _frame(modality.encode()) + _LEAF + _frame(file)}
    leaves["model_id"] = _LEAF + _frame(model_id.encode())
    digest = blake3()
    for name in sorted(leaves):
        digest.update(_frame(name.encode()) + leaves[name])
    return digest.hexdigest()


_LEAF = b"\x03"


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _packed(tensor: TensorData) -> list[Any]:
    raw = msgspec.msgpack.Ext(_RAW_VIEW, tensor.data)
    return [tensor.dtype, tensor.shape, raw]


def _packed_kind(kind: Kind) -> list[Any]:
    on_cpu = {"keep_on_cpu": kind.keep_on_cpu}
    match kind:
        case BatchedField():
            return ["batched", on_cpu]
        case FlatField():
            return ["flat", on_cpu | {"slices": kind.slices, "dim": kind.dim}]
        case SharedField():
            return ["shared", on_cpu | {"batch_size": kind.batch_size}]


# ---------------------------------------------------------------------------------------------
# reading: every level has its type, so that no bytes can make the decoder go deeper

_Size = Annotated[int, Meta(ge=0)]
_Argument = bool | int | Annotated[list[list[int | Bounds | None]], Meta(max_length=MAX_SLICES)]


class _Element(Struct, frozen=True, forbid_unknown_fields=True):
    data: tuple[DType, Annotated[list[_Size], Meta(max_length=MAX_DIMS)], msgspec.msgpack.Ext]
    field: tuple[Literal["batched", "flat", "shared"], dict[str, _Argument]]


_item = msgspec.msgpack.Decoder(
    Annotated[
        dict[Annotated[str, Meta(max_length=128)], _Element],
        Meta(min_length=1, max_length=MAX_FIELDS),
    ]
)


class _BatchedArguments(Struct, frozen=True, forbid_unknown_fields=True):
    keep_on_cpu: bool = False


class _FlatArguments(Struct, frozen=True, forbid_unknown_fields=True):
    slices: Slices
    dim: _Size = 0
    keep_on_cpu: bool = False


class _SharedArguments(Struct, frozen=True, forbid_unknown_fields=True):
    batch_size: _Size
    keep_on_cpu: bool = False


def _unpacked(element: _Element) -> WireField:
    dtype, shape, payload = element.data
    if payload.code != _RAW_VIEW:
        raise ValueError(f"an extension of type {payload.code} is no tensor's bytes")
    data = memoryview(payload.data)
    if math.prod(shape) * ITEM_BYTES[dtype] != data.nbytes:
        raise ValueError(f"{dtype} {shape} does not have {data.nbytes} bytes")
    if dtype == "bool" and bytes(data).strip(b"\0\1"):
        raise ValueError("a bool tensor has bytes other than 0 and 1")
    return WireField(TensorData(dtype, tuple(shape), data), _unpacked_kind(*element.field))


def _unpacked_kind(name: str, given: dict[str, Any]) -> Kind:
    if name == "flat":
        flat = msgspec.convert(given, _FlatArguments)
        return FlatField(flat.slices, flat.dim, flat.keep_on_cpu)
    if name == "shared":
        shared = msgspec.convert(given, _SharedArguments)
        return SharedField(shared.batch_size, shared.keep_on_cpu)
    return BatchedField(msgspec.convert(given, _BatchedArguments).keep_on_cpu)
