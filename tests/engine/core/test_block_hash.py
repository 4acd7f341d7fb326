"""The names of blocks: equal for equal prefixes of one tenant and adapter, and for nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from workers.engine.core.block_hash import block_hashes
from workers.engine.core.sequence import EngineRequest, Item, Sequence

ROOT = Path(__file__).parents[3]
BLOCK_SIZE = 3
PAD = 0
LENGTHS = {"a": 2, "b": 2, "c": 4}
"""Placeholder lengths of images: each content has one length."""


def sequence_of(
    token_ids: list[int], items: list[Item], tenant: str, adapter: str | None = None
) -> Sequence:
    request = EngineRequest("r", token_ids, items, SamplingParams(), tenant=tenant, adapter=adapter)
    return Sequence(request, 0, 0, list(token_ids), 1)


def hashes_of(sequence: Sequence) -> list[str]:
    return block_hashes(sequence, sequence.num_tokens // BLOCK_SIZE, BLOCK_SIZE)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """Prompts of alternating text and images, few of each, so that many share a prefix."""
    token_ids, items = [], []
    for _ in range(draw(st.integers(0, 3))):
        token_ids += draw(st.lists(st.integers(PAD, 2), max_size=3))
        mm_hash = draw(st.sampled_from(["", *LENGTHS]))
        if mm_hash:
            length = LENGTHS[mm_hash]
            items.append(Item("image", mm_hash, PlaceholderRange(len(token_ids), length), {}))
            token_ids += [PAD] * length
    tenant, adapter = draw(st.sampled_from([("", None), ("x", None), ("", "x"), ("x", "x")]))
    return sequence_of(token_ids, items, tenant, adapter)


def content_until(sequence: Sequence, stop: int) -> object:
    """All that the keys and values of the first `stop` tokens depend on."""
    filled: list[object] = [None] * sequence.num_tokens
    for item in sequence.request.items:
        for i in range(item.placeholder.length):
            filled[item.placeholder.offset + i] = (item.mm_hash, i)
    request = sequence.request
    return request.tenant, request.adapter, sequence.token_ids[:stop], filled[:stop]


@given(sequences(), sequences())
def test_hashes_are_equal_if_and_only_if_contents_are(sequence: Sequence, other: Sequence) -> None:
    for i, (first, second) in enumerate(zip(hashes_of(sequence), hashes_of(other), strict=False)):
        stop = (i + 1) * BLOCK_SIZE
        assert (first == second) == (content_until(sequence, stop) == content_until(other, stop))


@given(sequences())
def test_hashes_are_whole_and_stay_as_the_sequence_grows(sequence: Sequence) -> None:
    before = hashes_of(sequence)
    assert all(len(bytes.fromhex(block_hash)) >= 32 for block_hash in before)
    assert len(set(before)) == len(before)
    sequence.token_ids += [1] * BLOCK_SIZE
    grown = hashes_of(sequence)
    assert grown[: len(before)] == before
    request = sequence.request
    again = sequence_of(sequence.token_ids, request.items, request.tenant, request.adapter)
    assert hashes_of(again) == grown


def test_images_of_equal_size_share_no_block_from_the_first_on() -> None:
    token_ids = [1, 2, 1, 2] + [PAD] * 6 + [1, 2]
    place = PlaceholderRange(4, 6)
    hashes, other = (
        hashes_of(sequence_of(token_ids, [Item("image", mm_hash, place, {})], ""))
        for mm_hash in ("a" * 64, "b" * 64)
    )
    assert [first == second for first, second in zip(hashes, other, strict=True)] == [
        True,
        False,
        False,
        False,
    ]


def test_an_item_hash_covers_its_position_in_the_block() -> None:
    """The same image in the same placeholders, one token later."""
    token_ids = [PAD] * 6
    hashes, other = (
        hashes_of(sequence_of(token_ids, [Item("image", "a", PlaceholderRange(offset, 2), {})], ""))
        for offset in (3, 4)
    )
    assert [first == second for first, second in zip(hashes, other, strict=True)] == [True, False]


@pytest.mark.parametrize("mm_hash", ["", "a"])
def test_an_image_is_hashed_by_content_not_by_placeholder_tokens(mm_hash: str) -> None:
    item = Item("image", mm_hash, PlaceholderRange(0, 3), {})
    assert hashes_of(sequence_of([PAD] * 3, [item], "")) != hashes_of(
        sequence_of([PAD] * 3, [], "")
    )


def test_the_chain_is_the_same_in_every_process() -> None:
    # Not by an import of this file, which would take pytest and hypothesis along.
    program = (
        "from shared.protocol.multimodal import PlaceholderRange;"
        "from shared.protocol.sampling import SamplingParams;"
        "from workers.engine.core.block_hash import block_hashes;"
        "from workers.engine.core.sequence import EngineRequest, Item, Sequence;"
        "items = [Item('image', 'a', PlaceholderRange(1, 3), {})];"
        "request = EngineRequest('r', [1, 0, 0, 0, 2, 3], items, SamplingParams(), tenant='x');"
        "print(block_hashes(Sequence(request, 0, 0, [1, 0, 0, 0, 2, 3], 1), 2, 3))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    item = Item("image", "a", PlaceholderRange(1, 3), {})
    assert outputs == {f"{hashes_of(sequence_of([1, 0, 0, 0, 2, 3], [item], 'x'))}\n"}
