"""Envelope: a binary layout for a typed head and its tensors.

    0   4  magic "PMM1"
    4   2  u16 version
    6   2  u16 flags, none defined yet
    8   4  u32 length of the header
    12  4  u32 offset of the body, a multiple of 64
    16  .. header: msgpack of [table of (dtype, shape), head], zero padded up to the body
    body   the tensors' buffers in the table's order, each at the next multiple of 64, zero padded

All integers are little endian, all buffers C order and little endian. The table contains neither
offsets nor sizes, because both follow from dtype and shape. Therefore no envelope can claim an
overlap, a gap or a wrong size.

This module does not depend on a tensor library; `shared.codec.tensors` converts to torch tensors.
"""

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from shared.errors import DecodeError, PayloadTooLarge, UnsupportedVersion
from shared.protocol.msgpack_formats import (
    FIXED_CHILDREN,
    FIXED_SIZES,
    FORMATS,
    NO_VALUE,
    RUN_LEN,
    RUN_OF_SCALARS,
    SHORT_RUN_LEN,
    SHORT_RUN_OF_SCALARS,
    step,
)

MAGIC = b"PMM1"
VERSION = 1
# The size of a cache line and of the widest vector load, so that no buffer begins within one.
ALIGNMENT = 64
# The head contains the prompt's token ids of up to 5 bytes; there is room for 800,000.
MAX_HEADER_BYTES = 4 * 2**20
# Eight images of three fields need 24; ten times that leaves room for video and audio.
MAX_TENSORS = 256
# Pagemill's tensors have at most 3 dimensions; numpy and torch support 64.
MAX_DIMS = 8
# The number of bytes does not bound the dimensions of an empty tensor, but its strides must fit
# into 64 bits.
MAX_ELEMENTS = 2**48
# The deepest valid header has 5 levels. msgspec recurses, and depth 600 was seen to crash a process
# on a thread with a 128 KiB stack.
MAX_DEPTH = 32
# Limit on arrays, maps, strings, and numbers outside of long runs. A valid head has some hundreds.
# 5 MB of empty arrays became 368 MB of Python objects in a test.
MAX_NODES = 65_536

DType = Literal[
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
ITEM_BYTES: dict[str, int] = dict(zip(get_args(DType), (1, 1, 1, 2, 4, 8, 2, 2, 4, 8), strict=True))

T = TypeVar("T", bound=Struct)

_PREFIX = struct.Struct("<4sHHII")


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor independent of any library: `data` is a flat byte view, C order, little endian."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class _Entry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: DType
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_DIMS)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class _Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensors: Annotated[list[_Entry], Meta(max_length=MAX_TENSORS)]
    head: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_key_decoder: msgspec.msgpack.Decoder[str | int] = msgspec.msgpack.Decoder(str | int)
_header_decoder = msgspec.msgpack.Decoder(_Header)


def encode(head: Struct, tensors: Sequence[TensorData]) -> bytes:
    """Encode an envelope into one allocation; every buffer is copied once.

    Raises the errors of `encode_parts`.
    """
    return b"".join(encode_parts(head, tensors))


def encode_parts(head: Struct, tensors: Sequence[TensorData]) -> list[bytes | memoryview]:
    """Encode an envelope as consecutive parts, without copying the tensors' buffers.

    Raises PayloadTooLarge for a head over MAX_HEADER_BYTES or more than MAX_TENSORS tensors, and
    ValueError for a tensor with an unknown dtype or with a buffer that does not fit its shape.
    """
    entries = [_entry_of(tensor) for tensor in tensors]
    header = _encoder.encode(_Header(entries, msgspec.Raw(_encoder.encode(head))))
    if len(header) > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise PayloadTooLarge(
            f"the request has {len(header) / 1e6:.2f} MB without its media, and {len(entries)}"
            f" arrays of media; the limits are {MAX_HEADER_BYTES / 1e6:.2f} MB and {MAX_TENSORS}"
            " arrays"
        )
    body_offset = _align(_PREFIX.size + len(header))
    parts: list[bytes | memoryview] = [
        _PREFIX.pack(MAGIC, VERSION, 0, len(header), body_offset),
        header,
    ]
    end = _PREFIX.size + len(header)
    for tensor, (start, next_end) in zip(tensors, _spans(entries, body_offset), strict=True):
        parts += bytes(start - end), tensor.data
        end = next_end
    parts.append(bytes(_align(end) - end))
    return parts


def decode(data: bytes | bytearray | memoryview, head_type: type[T]) -> tuple[T, list[TensorData]]:
    """Decode the head and its tensors, which are read-only views into `data`.

    Raises UnsupportedVersion for an envelope of a newer version, and DecodeError, and no other
    error, for any other bytes that are not an envelope of this type.
    """
    view = memoryview(data).toreadonly()
    header_end, body_offset = _read_prefix(view)
    header_bytes = view[_PREFIX.size : header_end]
    try:
        _check_nesting(bytes(header_bytes))
        header = _header_decoder.decode(header_bytes)
        head = _head_decoder(head_type).decode(header.head)
    except ValueError as error:  # errors of msgspec, and UnicodeDecodeError for keys
        raise DecodeError(f"the header is invalid: {error}") from error
    return head, _read_tensors(view, header.tensors, header_end, body_offset)


@functools.cache
def _head_decoder(head_type: type[T]) -> msgspec.msgpack.Decoder[T]:
    return msgspec.msgpack.Decoder(head_type)


def _entry_of(tensor: TensorData) -> _Entry:
    entry = msgspec.convert((tensor.dtype, tensor.shape), _Entry)
    if entry.num_bytes != tensor.data.nbytes:
        raise ValueError(
            f"{tensor.dtype} {tensor.shape} is {entry.num_bytes} bytes, not {tensor.data.nbytes}"
        )
    return entry


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _spans(entries: Sequence[_Entry], body_offset: int) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each buffer, which starts at the next aligned offset."""
    offset = body_offset
    for entry in entries:
        end = offset + entry.num_bytes
        yield offset, end
        offset = _align(end)


def _read_prefix(view: memoryview) -> tuple[int, int]:
    """Return the end of the header and the offset of the body, both within `view`."""
    if len(view) < _PREFIX.size:
        raise DecodeError(f"{len(view)} bytes are too few for an envelope")
    magic, version, flags, header_len, body_offset = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError("the bytes do not begin with an envelope's magic")
    if version > VERSION:
        raise UnsupportedVersion(
            f"an envelope has version {version}, and this worker reads version {VERSION}"
        )
    if version != VERSION or flags:
        raise DecodeError(f"version {version} with flags {flags} is not supported")
    if header_len > MAX_HEADER_BYTES:
        raise DecodeError(f"a header of {header_len} bytes is over the limit {MAX_HEADER_BYTES}")
    header_end = _PREFIX.size + header_len
    if body_offset != _align(header_end) or body_offset > len(view):
        raise DecodeError(
            f"header of {header_len} bytes and body at {body_offset} contradict each other or the"
            f" length of {len(view)} bytes"
        )
    return header_end, body_offset


def _read_tensors(
    view: memoryview, entries: Sequence[_Entry], header_end: int, body_offset: int
) -> list[TensorData]:
    tensors = []
    padding_start = header_end
    for entry, (start, end) in zip(entries, _spans(entries, body_offset), strict=True):
        if math.prod(max(size, 1) for size in entry.shape) > MAX_ELEMENTS:
            raise DecodeError(f"shape {list(entry.shape)} is over the limit of {MAX_ELEMENTS}")
        if end > len(view):
            raise DecodeError(f"{entry.dtype} {list(entry.shape)} does not fit into the envelope")
        _check_padding(view[padding_start:start])
        data = view[start:end]
        # A bool of another value is undefined behaviour in tensor libraries.
        if entry.dtype == "bool" and bytes(data).strip(b"\0\1"):
            raise DecodeError("a bool tensor has bytes other than 0 and 1")
        tensors.append(TensorData(entry.dtype, entry.shape, data))
        padding_start = end
    if _align(padding_start) != len(view):
        raise DecodeError(
            f"the envelope is {len(view)} bytes long, its contents {_align(padding_start)}"
        )
    _check_padding(view[padding_start:])
    return tensors


def _check_padding(padding: memoryview) -> None:
    if any(padding):
        raise DecodeError("bytes between the buffers are not zero")


# ---------------------------------------------------------------------------------------------
# A non-recursive walk over msgpack, before msgspec's decoder recurses into it.


_KNOWN = {op for op, form in FORMATS.items() if not form.is_extension}


def _check_nesting(data: bytes) -> None:
    """Check that `data` is complete msgpack with bounded depth and number of values.

    The keys of each map must be distinct strings or integers, because msgspec would silently take
    the last of several equal ones. Raises DecodeError or ValueError.
    """
    offset = num_nodes = 0
    # Remaining values of the innermost container, and its keys if it is a map.
    left = 1
    keys: set[str | int] | None = None
    outer: list[tuple[int, set[str | int] | None]] = []
    end = len(data)
    while left or outer:
        if not left:
            left, keys = outer.pop()
            continue
        if keys is None and left >= SHORT_RUN_LEN:
            offset, run_len = _skip_run(data, offset, left)
            num_nodes += run_len if run_len < RUN_LEN else 0
            left -= run_len
            if run_len:
                continue
        start, op = offset, data[offset] if offset < end else NO_VALUE
        if size := FIXED_SIZES[op]:
            offset, children, is_map = start + size, FIXED_CHILDREN[op], op & 0xF0 == 0x80
        else:
            offset, children, is_map = _step(data, start)
        num_nodes += 1
        if keys is not None and left % 2 == 0:
            _add_key(keys, data[start:offset])
        left -= 1
        if children:
            outer.append((left, keys))
            left, keys = children, set() if is_map else None
        if num_nodes > MAX_NODES or len(outer) > MAX_DEPTH:
            raise DecodeError(
                f"the header is nested deeper than {MAX_DEPTH} or has more than {MAX_NODES} values"
            )
    if offset > end:
        raise DecodeError("the header ends in the middle of a value")


def _skip_run(data: bytes, offset: int, left: int) -> tuple[int, int]:
    """Return the end and the length of a run of scalars at `offset`; the length 0 for no run."""
    if left >= RUN_LEN and (run := RUN_OF_SCALARS.match(data, offset)):
        return run.end(), RUN_LEN
    if run := SHORT_RUN_OF_SCALARS.match(data, offset):
        return run.end(), SHORT_RUN_LEN
    return offset, 0


def _add_key(keys: set[str | int], packed: bytes) -> None:
    # Most keys are short strings, after one byte with their length.
    key = packed[1:].decode() if packed[0] & 0xE0 == 0xA0 else _key_decoder.decode(packed)
    if key in keys:
        raise DecodeError("the header has the same key twice")
    keys.add(key)


def _step(data: bytes, offset: int) -> tuple[int, int, bool]:
    """Step over the value at `offset`, without its children.

    Return the next offset, the number of children, and whether these are keys and values.
    """
    # No head has extension types, and they could contain pickles.
    if offset < len(data) and data[offset] not in _KNOWN:
        raise DecodeError(f"the header has a value of unknown type {data[offset]:#04x}")
    if (value := step(data, offset)) is None:
        raise DecodeError("the header ends in the middle of a value")
    end, children, form = value
    return end, children, form.is_map
