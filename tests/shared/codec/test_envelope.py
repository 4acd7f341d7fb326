import contextlib
import math
import os
import random
import struct
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import envelope as codec
from shared.codec.envelope import ITEM_BYTES, TensorData, decode, encode
from shared.errors import DecodeError, PayloadTooLarge, UnsupportedVersion


class Head(msgspec.Struct, frozen=True):
    name: str = "x"
    ids: list[int] = []


def raw_tensor(dtype: str, shape: Sequence[int], fill: int = 1) -> TensorData:
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    return TensorData(dtype, tuple(shape), memoryview(bytes([fill]) * num_bytes))


def envelope(
    header: bytes,
    body: bytes = b"",
    *,
    header_len: int | None = None,
    body_offset: int | None = None,
) -> bytes:
    """Build an envelope by hand. Any of its numbers can be wrong."""
    true_offset = -(-(16 + len(header)) // 64) * 64
    length = len(header) if header_len is None else header_len
    offset = true_offset if body_offset is None else body_offset
    prefix = struct.pack("<4sHHII", b"PMM1", 1, 0, length, offset)
    return (prefix + header).ljust(true_offset, b"\0") + body


def packed(tensors: object, head: object = None) -> bytes:
    return msgspec.msgpack.encode([tensors, {} if head is None else head])


def refuses(data: bytes) -> bool:
    with pytest.raises(DecodeError):
        decode(data, Head)
    return True


tensors = st.builds(
    raw_tensor,
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 1),
)
heads = st.builds(Head, st.text(max_size=40), st.lists(st.integers(0, 2**40), max_size=300))

SAMPLE = encode(
    Head("sample", list(range(200))),
    [raw_tensor("uint8", [3, 5]), raw_tensor("int64", [3]), raw_tensor("bool", [2])],
)


@given(heads, st.lists(tensors, max_size=5))
def test_encoding_round_trips(head: Head, buffers: list[TensorData]) -> None:
    assert decode(encode(head, buffers), Head) == (head, buffers)


@given(heads, st.lists(tensors, max_size=5))
def test_buffers_are_aligned_views_that_cannot_be_written(
    head: Head, buffers: list[TensorData]
) -> None:
    data = encode(head, buffers)
    assert len(data) % 64 == 0
    start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    for tensor in decode(data, Head)[1]:
        assert tensor.data.readonly
        assert tensor.data.obj is data
        if tensor.data.nbytes:
            address = np.frombuffer(tensor.data, np.uint8).__array_interface__["data"][0]
            assert (address - start) % 64 == 0


def test_decoding_copies_no_buffer() -> None:
    data = encode(Head(), [raw_tensor("uint8", [2**24])])
    tracemalloc.start()
    decode(data, Head)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_each_content_has_one_encoding() -> None:
    head, buffers = decode(SAMPLE, Head)
    assert encode(head, buffers) == SAMPLE


@pytest.mark.parametrize(
    "tensor",
    [
        TensorData("float32", (2,), memoryview(bytes(7))),
        TensorData("complex64", (1,), memoryview(bytes(8))),
        TensorData("uint8", (-1,), memoryview(b"")),
        TensorData("uint8", (1,) * 9, memoryview(b"1")),
    ],
    ids=["size", "dtype", "negative", "dimensions"],
)
def test_encode_refuses_a_tensor_whose_buffer_does_not_fit(tensor: TensorData) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        encode(Head(), [tensor])


def test_encode_refuses_what_decode_refuses() -> None:
    with pytest.raises(PayloadTooLarge, match=r"has 4\.19 MB without its media.* are 4\.19 MB"):
        encode(Head("x" * codec.MAX_HEADER_BYTES), [])
    with pytest.raises(PayloadTooLarge):
        encode(Head(), [raw_tensor("uint8", [1])] * (codec.MAX_TENSORS + 1))


def test_a_head_of_a_long_prompt_is_fast_to_decode() -> None:
    rng = random.Random(0)
    data = encode(Head("x", [rng.randrange(150_000) for _ in range(32_768)]), [])
    start = time.process_time()
    decode(data, Head)
    assert time.process_time() - start < 0.5


# ---------------------------------------------------------------------------------------------
# hostile bytes


def test_truncation_at_every_length_is_refused() -> None:
    assert all(refuses(SAMPLE[:length]) for length in range(len(SAMPLE)))


def test_trailing_bytes_are_refused() -> None:
    assert refuses(SAMPLE + b"\0")
    assert refuses(SAMPLE + bytes(64))


def test_a_newer_envelope_is_distinguished_from_other_bytes() -> None:
    with pytest.raises(UnsupportedVersion, match="has version 2, and this worker reads version 1"):
        decode(SAMPLE[:4] + b"\2\0" + SAMPLE[6:], Head)


def test_bit_flips_never_raise_anything_else() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        data = bytearray(SAMPLE)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(DecodeError, UnsupportedVersion):
            decode(bytes(data), Head)


@given(st.binary(max_size=300))
def test_random_headers_never_raise_anything_else(header: bytes) -> None:
    for data in (header, envelope(header), envelope(b"\x92\x90" + header)):
        with contextlib.suppress(DecodeError):
            decode(data, Head)


def test_every_byte_of_padding_must_be_zero() -> None:
    header_end = 16 + struct.unpack_from("<I", SAMPLE, 8)[0]
    body = struct.unpack_from("<I", SAMPLE, 12)[0]
    gaps = [(header_end, body), (body + 15, body + 64), (body + 88, body + 128)]
    gaps.append((body + 130, body + 192))
    for index in [i for gap in gaps for i in range(*gap)]:
        assert refuses(SAMPLE[:index] + b"\1" + SAMPLE[index + 1 :])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"MMQ1" + SAMPLE[4:],
        SAMPLE[:4] + b"\0\0" + SAMPLE[6:],
        SAMPLE[:6] + b"\1\0" + SAMPLE[8:],
        envelope(packed([]), header_len=2**32 - 1),
        envelope(packed([]), header_len=codec.MAX_HEADER_BYTES + 1),
        envelope(packed([]), body_offset=0),
        envelope(packed([]), body_offset=128),
        envelope(packed([]), body_offset=2**32 - 64),
        envelope(packed([]), body_offset=63),
        envelope(packed([]) + b"\xc0"),
    ],
    ids=lambda data: data[:16].hex(),
)
def test_lying_prefixes_are_refused(data: bytes) -> None:
    assert refuses(data)


@pytest.mark.parametrize(
    "table",
    [
        [["uint8", [65]]],
        [["uint8", [2**62, 4]]],
        [["uint8", [2**63]]],
        [["uint8", [0, 2**62, 4]]],
        [["uint8", [-1]]],
        [["uint8", [-8, -8]]],
        [["uint8", [1.0]]],
        [["uint8", [True]]],
        [["uint8", [1] * 9]],
        [["uint8"]],
        [["uint8", [1], 0]],
        [["complex64", [1]]],
        [["object", [1]]],
        [[0, [1]]],
        [{"dtype": "uint8", "shape": [1]}],
        [["uint8", [1]]] * 257,
        [["uint8", [1]], ["uint8", [1]]],  # needs a second buffer
        {},
        None,
    ],
    ids=str,
)
def test_lying_tensor_tables_are_refused(table: object) -> None:
    assert refuses(envelope(packed(table), bytes(64)))


def test_a_bool_other_than_0_and_1_is_refused() -> None:
    good = envelope(packed([["bool", [3]]]), b"\1\0\1" + bytes(61))
    assert len(decode(good, Head)[1]) == 1
    assert refuses(good.replace(b"\1\0\1" + bytes(61), b"\1\2\1" + bytes(61)))


@pytest.mark.parametrize(
    "lie",
    [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"],
    ids=["array32", "map32", "bin32", "str32", "ext32"],
)
def test_lying_lengths_are_refused_at_once(lie: bytes) -> None:
    tracemalloc.start()
    start = time.process_time()
    for place in (b"", b"\x92", b"\x92\x90", b"\x92\x90\x81\xa7unknown"):
        assert refuses(envelope(place + lie + b"\xff\xff\xff\xff" + bytes(100)))
    assert time.process_time() - start < 0.5
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


DEEP = {
    "33 arrays": b"\x91" * 33 + b"\0",
    "600 arrays": b"\x91" * 600 + b"\0",
    "a million arrays": b"\x91" * 1_000_000 + b"\0",
    "maps": b"\x81\xa1a" * 600 + b"\0",
    "200 lying arrays": b"\xdc\xff\xff" * 200,
    "an unknown field": b"\x81\xa1u" + b"\x91" * 600 + b"\0",
}


@pytest.mark.parametrize("stack_kib", [128, None])
@pytest.mark.parametrize("head", DEEP.values(), ids=DEEP.keys())
def test_deep_nesting_is_refused_even_on_a_small_stack(head: bytes, stack_kib: int) -> None:
    outcome = []
    if stack_kib:
        before = threading.stack_size(stack_kib * 1024)
        thread = threading.Thread(target=lambda: outcome.append(_outcome(head)))
        thread.start()
        threading.stack_size(before)
        thread.join()
    else:
        outcome.append(_outcome(head))
    assert outcome == [DecodeError]


def _outcome(head: bytes) -> type[BaseException] | None:
    try:
        decode(envelope(b"\x92\x90" + head), Head)
    except BaseException as error:
        return type(error)
    return None


@pytest.mark.parametrize("piece", [b"\x90", b"\x80", b"\xa0", b"\x91\x00"], ids=bytes.hex)
def test_a_flood_of_small_values_is_refused_without_growth(piece: bytes) -> None:
    count = 4_000_000 // len(piece)
    head = b"\x81\xa1u\xdd" + count.to_bytes(4, "big") + piece * count
    data = envelope(b"\x92\x90" + head)
    tracemalloc.start()
    start = time.process_time()
    assert refuses(data)
    elapsed = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert elapsed < 2.0  # tracing slows decoding down several times
    assert peak < 16 * 2**20


def test_extension_types_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    bomb = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for code in (1, 2, 3, -1):
        ext = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, bomb))
        assert refuses(envelope(b"\x92\x90\x81\xa1u" + ext))
    assert not os.path.exists(marker)


def test_the_walk_agrees_with_msgspec_on_whole_values() -> None:
    """The walk covers every type of value that msgspec writes."""
    values: list[object] = [
        0,
        -1,
        200,
        -100,
        2**15,
        -(2**15),
        2**31,
        -(2**31),
        2**63,
        -(2**63),
        1.5,
        None,
        True,
    ]
    values += ["", "a" * 31, "a" * 200, "a" * 70_000, b"", b"a" * 300, b"a" * 70_000]
    values += [[], [1] * 15, [1] * 70_000, {}, {str(i): [i] for i in range(1000)}]
    check_nesting = codec._check_nesting
    for value in values:
        data = msgspec.msgpack.encode(value)
        check_nesting(data)
        with pytest.raises(DecodeError):
            check_nesting(data[:-1])
