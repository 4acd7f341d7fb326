"""The hash that names content: rows S01 to S03. That of images is in tests/renderer."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.multimodal import HashPart, content_hash

parts = st.recursive(
    st.text(max_size=4) | st.binary(max_size=4) | st.integers(-300, 300),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(parts, max_size=4), st.lists(parts, max_size=4))
def test_equal_hashes_are_of_equal_content(first: list[HashPart], other: list[HashPart]) -> None:
    assert (content_hash(*first) == content_hash(*other)) == (first == other)


DIFFERENT: list[tuple[HashPart, ...]] = [
    (),
    ("",),
    ("", ""),
    (b"",),
    ([],),
    ([[]],),
    ([], []),
    ("ab", "c"),
    ("a", "bc"),
    ("abc",),
    (b"abc",),
    (["abc"],),
    ([[1, 2], [3]],),
    ([[1], [2, 3]],),
    ([1, 2, 3],),
    (1, 2, 3),
    ("1", "2", "3"),
    (12, 3),
    ("s\x01\0\0\0\0\0\0\0a",),
    ("é",),
    ("e\u0301",),
    (b"\xc3\xa9",),
]


def test_framing_distinguishes_all_of_these() -> None:
    assert len({content_hash(*parts) for parts in DIFFERENT}) == len(DIFFERENT)


def test_a_view_is_as_good_as_its_bytes() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert content_hash(array.data) == content_hash(array.tobytes())
    with pytest.raises(BufferError):
        content_hash(array.T.data)


def test_a_hash_is_whole_and_none_of_many_is_another() -> None:
    hashes = {content_hash(i, "fingerprint") for i in range(100_000)}
    assert len(hashes) == 100_000
    assert {len(bytes.fromhex(text)) for text in hashes} == {32}


def test_it_is_the_same_in_every_process() -> None:
    script = (
        "from shared.protocol.multimodal import content_hash; print(content_hash('a', [1, b'b']))"
    )
    root = Path(__file__).parents[3]
    hashes = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert hashes == {content_hash("a", [1, b"b"]).encode() + b"\n"}
