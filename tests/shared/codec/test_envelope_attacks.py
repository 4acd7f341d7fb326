"""Malicious envelopes, and the number of copied bytes: rows S23 to S27."""

import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.blobs import mm_items
from shared.codec.arrays import from_numpy
from shared.codec.envelope import ALIGNMENT, TensorData, decode, encode, encode_parts
from shared.codec.tensors import to_torch
from shared.errors import DecodeError
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem, PlaceholderRange
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, RenderBody, Task, TaskHeader
from tests.shared.codec.test_envelope import DEEP, Head, envelope, packed
from tests.tasks import engine_task

ROOT = Path(__file__).parents[3]
MIB = 2**20


# -- S23: code in the payload ---------------------------------------------------------------------


class Bomb:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self._marker),)


def test_a_pickle_is_not_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    control = tmp_path / "control"
    pickle.loads(pickle.dumps(Bomb(control)))
    assert control.exists(), "the bomb works"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        bomb = pickle.dumps(Bomb(marker), protocol)
        extensions = [msgspec.msgpack.Ext(code, bomb) for code in (1, 2, 3, 5, -1)]
        heads = [bomb, {"name": bomb}, *extensions]
        heads += [{"name": extension} for extension in extensions]
        heads += [{"unknown": [extension]} for extension in extensions]
        payloads = [bomb, envelope(bomb), envelope(b"\x92\x90" + bomb)]
        payloads += [envelope(packed([["uint8", [64]]], head), bomb[:64]) for head in heads]
        for payload in payloads:
            for head_type in (Head, Task[EngineBody]):
                with pytest.raises(DecodeError):
                    decode(payload, head_type)
            with pytest.raises(DecodeError):
                decode(payload, Task[RenderBody])
        decode(envelope(packed([], {"unknown": bomb})), Head)
    assert not marker.exists()


# -- S24, S25: depth and number -------------------------------------------------------------------

FLOODS = {  # repeated bytes, and their number of values
    "empty arrays": (b"\x90", 1),
    "empty maps": (b"\x80", 1),
    "empty strings": (b"\xa0", 1),
    "pairs": (b"\x92\0\0", 1),
    "small maps": (b"\x81\xa1a\0", 1),
    "numbers among strings": (b"\0" * 127 + b"\xa0", 128),
}
CHILD = """
import json, re, sys, threading
from pathlib import Path
from shared.codec.envelope import decode, encode
from shared.errors import DecodeError
from shared.protocol.task_messages import EngineBody, Task
from tests.shared.codec.test_envelope import Head

def peak_kib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

def decode_all(data):
    for head_type in (Head, Task[EngineBody]):
        try:
            decode(data, head_type)
        except DecodeError:
            outcomes.append("refused")

decode(encode(Head(), []), Head)
threading.stack_size(128 * 1024)
for name in sys.argv[1:]:
    outcomes = []
    data = Path(name).read_bytes()
    before = peak_kib()
    decode_all(data)
    thread = threading.Thread(target=decode_all, args=(data,))
    thread.start()
    thread.join()
    print(json.dumps([outcomes, peak_kib() - before]))
"""


def test_floods_and_depth_neither_grow_nor_crash_the_process(tmp_path: Path) -> None:
    """Decode in another process, in its main thread and in one with a stack of 128 KiB."""
    vectors = {f"deep {name}": head for name, head in DEEP.items()}
    vectors["deep, in an extension"] = b"\x81\xa1u\xc7\xff\x01" + b"\x91" * 255
    for name, (piece, num_values) in FLOODS.items():
        times = 4_000_000 // len(piece)
        array = b"\xdd" + (times * num_values).to_bytes(4, "big") + piece * times
        vectors[f"flood of {name}"] = b"\x81\xa1u" + array
    files = []
    for i, head in enumerate(vectors.values()):
        files.append(tmp_path / str(i))
        files[-1].write_bytes(envelope(b"\x92\x90" + head))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, files)], cwd=ROOT, capture_output=True, check=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for name, (outcomes, growth_kib) in zip(vectors, results, strict=True):
        assert outcomes == ["refused"] * 4, name
        assert growth_kib < 32 * 1024, name


def test_five_megabytes_of_anything_are_over_the_limit_of_a_head() -> None:
    with pytest.raises(DecodeError, match="over the limit"):
        decode(
            envelope(b"\x92\x90\xdd" + (5_000_000).to_bytes(4, "big") + b"\x90" * 5_000_000), Head
        )


# -- S27: two readers of one message --------------------------------------------------------------


def task() -> Task[EngineBody]:
    item = MultiModalKwargsItem(
        "image", "ab" * 32, PlaceholderRange(0, 1), {"pixel_patches": 0, "image_grid_thw": 1}
    )
    return engine_task("r1", [1, 2], [item])


def a_map(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(key + value for key, value in pairs)


def fields_of(struct: msgspec.Struct) -> dict[str, bytes]:
    """The encoded values of a Struct by field."""
    return {
        name: msgspec.msgpack.encode(value)
        for name, value in msgspec.structs.asdict(struct).items()
    }


def as_map(fields: dict[str, bytes], *more: tuple[bytes, bytes]) -> bytes:
    return a_map(*((msgspec.msgpack.encode(k), v) for k, v in fields.items()), *more)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        *(("task", field) for field in Task.__struct_fields__),
        *(("header", field) for field in TaskHeader.__struct_fields__),
        *(("body", field) for field in EngineBody.__struct_fields__),
    ],
)
def test_duplicate_task_fields_are_refused(part: str, field: str) -> None:
    parts = {name: as_map(fields_of(getattr(task(), name))) for name in ("header", "body")}
    assert decode(envelope(b"\x92\x90" + as_map(parts)), Task[EngineBody])[0] == task()
    fields = parts if part == "task" else fields_of(getattr(task(), part))
    short, long = bytes([0xA0 + len(field)]), bytes([0xD9, len(field)])
    for spelling in (short, long, b"\xda\0" + long[1:], b"\xdb\0\0\0" + long[1:]):
        doubled = as_map(fields, (spelling + field.encode(), fields[field]))
        whole = doubled if part == "task" else as_map(parts | {part: doubled})
        with pytest.raises(DecodeError, match="twice"):
            decode(envelope(b"\x92\x90" + whole), Task[EngineBody])


def test_duplicate_token_id_keys_are_refused() -> None:
    params = SamplingParams(logit_bias={5: 1.0, 200_000: -2.5})
    biased = engine_task("r1", [1, 2], [], params)
    assert decode(encode(biased, []), Task[EngineBody])[0] == biased
    with pytest.raises(DecodeError, match="twice"):
        decode(envelope(b"\x92\x90" + a_map((b"\5", b"\0"), (b"\xcc\5", b"\0"))), Task[EngineBody])


def test_duplicate_tensor_names_are_refused() -> None:
    contents = b"\x82\xa6fields\x82\xa1a\0\xa1a\1\xaanum_tokens\1"
    with pytest.raises(DecodeError, match="twice"):
        decode(envelope(b"\x92\x90" + contents), mm_items.ItemContents)


@pytest.mark.parametrize(
    "key", [b"\0", b"\xc0", b"\xc4\1a", b"\x91\0", b"\xa1\xff", b"\xcb" + bytes(8)]
)
def test_keys_are_strings(key: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(envelope(b"\x92\x90" + a_map((key, b"\0"))), Head)


def test_two_maps_may_have_the_same_key() -> None:
    inner = {"a": {"a": [{"a": 1}, {"a": 2}]}, "b": {"a": 3}}
    assert decode(envelope(packed([], {"unknown": inner})), Head)[0] == Head()


def test_a_task_for_the_renderer_that_is_too_deep_is_undecodable() -> None:
    for depth in (600, 100_000):
        with pytest.raises(DecodeError):
            decode(envelope(b"\x92\x90\x81\xa1u" + b"\x91" * depth + b"\0"), Task[RenderBody])


def test_a_reference_to_a_blob_has_a_key_and_a_size() -> None:
    good: list[Any] = ["worker", bytes(32), 5]
    assert msgspec.convert(good, BlobRef, strict=False) == BlobRef(*good)
    for bad in (["w", b"", 5], ["w", bytes(31), 5], ["w", bytes(33), 5], ["w", bytes(32), -1]):
        item = {
            "modality": "image",
            "mm_hash": "h",
            "placeholder": [0, 1],
            "blob": bad,
        }
        head = msgspec.to_builtins(task(), builtin_types=(bytes,))
        head["body"] |= {"items": [item]}
        with pytest.raises(DecodeError, match="blob"):
            decode(envelope(packed([], head)), Task[EngineBody])


# -- what is copied -------------------------------------------------------------------------------

SIZE = 16 * MIB


@contextmanager
def no_more_than(num_bytes: int) -> Iterator[None]:
    """Assert the limit on allocations, all of which Python and numpy report to tracemalloc."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= num_bytes


def address(buffer: bytes | memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def three_tensors() -> tuple[list[np.ndarray[Any, Any]], list[TensorData]]:
    arrays: list[np.ndarray[Any, Any]] = [
        np.full((SIZE // 4, 4), 7, np.uint8),
        np.full(SIZE // 4, 2.5, np.float32),
    ]
    arrays.append(np.array([1, 2, 3]))
    return arrays, [from_numpy(array) for array in arrays]


def test_encoding_in_parts_copies_no_tensor() -> None:
    arrays, tensors = three_tensors()
    with no_more_than(MIB):
        parts = encode_parts(Head(), tensors)
    large = [part for part in parts if isinstance(part, memoryview)]
    assert [address(part) for part in large] == [array.ctypes.data for array in arrays]


def test_joining_copies_every_byte_once() -> None:
    _, tensors = three_tensors()
    num_bytes = sum(len(memoryview(part).cast("B")) for part in encode_parts(Head(), tensors))
    assert num_bytes > 2 * SIZE - 100
    with no_more_than(num_bytes + MIB):
        data = encode(Head(), tensors)
    assert len(data) == num_bytes


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decoding_copies_no_tensor(kind: type) -> None:
    arrays, tensors = three_tensors()
    data = kind(encode(Head(), tensors))
    start = address(data)
    with no_more_than(MIB):
        _, received = decode(data, Head)
        restored = [to_torch(tensor) for tensor in received]
    for tensor, whole, array in zip(received, restored, arrays, strict=True):
        offset = address(tensor.data) - start
        assert 0 < offset <= len(data) - tensor.data.nbytes
        assert offset % ALIGNMENT == 0
        assert tensor.data.readonly
        assert whole.data_ptr() == address(tensor.data)
        assert np.array_equal(whole.numpy(), array)
