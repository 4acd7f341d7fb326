"""The slot pool against a model: slots do not overlap, and pinned ones do not move."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.blobs.slot_allocator import ALIGNMENT, Slot, SlotPool

CAPACITY = 8 * ALIGNMENT
NAMES = st.sampled_from("abcdef")
HOLDERS = st.sampled_from("xyz")
SIZES = st.integers(0, CAPACITY + 1)


def check_invariants(pool: SlotPool) -> None:
    """Slots and free extents cover the area exactly once, and both maps of pins agree."""
    slots, free, names_of = pool._slots, pool._free, pool._names_of
    extents = sorted([*free, *((s.offset, s.size) for s in slots.values())])
    end = 0
    for offset, size in extents:
        assert offset == end, f"a gap or an overlap at {min(offset, end)}"
        end = offset + size
    assert end == pool.capacity
    for (offset, size), (next_offset, _) in pairwise(free):
        assert offset + size < next_offset, "adjacent free extents"
    pins = {(name, holder) for name, s in slots.items() for holder in s.pins}
    assert pins == {(n, holder) for holder, names in names_of.items() for n in names}


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(CAPACITY + 5)
        self.pins: dict[str, set[str]] = {}
        self.offsets: dict[str, int] = {}

    @rule(name=NAMES, num_bytes=SIZES, holder=HOLDERS)
    def add(self, name: str, num_bytes: int, holder: str) -> None:
        if name in self.pool:
            return
        slot = self.pool.add(name, num_bytes, holder)
        if slot is not None:
            self.pins[name] = {holder}
            self.offsets[name] = slot.offset

    @rule(name=NAMES, holder=HOLDERS)
    def pin(self, name: str, holder: str) -> None:
        slot = self.pool.pin(name, holder)
        assert (slot is not None) == (name in self.pool)
        if slot is not None:
            self.pins[name].add(holder)

    @rule(name=NAMES, holder=HOLDERS)
    def unpin(self, name: str, holder: str) -> None:
        self.pool.unpin(name, holder)
        self.pins.get(name, set()).discard(holder)

    @rule(holder=HOLDERS)
    def unpin_all(self, holder: str) -> None:
        self.pool.unpin_all(holder)
        for holders in self.pins.values():
            holders.discard(holder)

    @invariant()
    def what_is_pinned_is_where_it_was(self) -> None:
        check_invariants(self.pool)
        for name, holders in self.pins.items():
            if holders:
                slot = self.pool.pin(name, next(iter(holders)))
                assert slot is not None
                assert (slot.pins, slot.offset) == (holders, self.offsets[name])
        self.pins = {name: holders for name, holders in self.pins.items() if name in self.pool}


TestSlots = SlotMachine.TestCase


def put(pool: SlotPool, name: str, num_pages: int) -> Slot | None:
    """Add a slot without pins."""
    slot = pool.add(name, num_pages * ALIGNMENT, "writer")
    pool.unpin(name, "writer")
    return slot


def test_the_least_recently_used_slot_is_evicted() -> None:
    pool = SlotPool(CAPACITY)
    for name in "abcd":
        put(pool, name, 2)
    pool.pin("a", "reader")
    pool.unpin("a", "reader")
    put(pool, "e", 2)
    assert [name for name in "abcde" if name in pool] == ["a", "c", "d", "e"]


def test_pinned_slots_are_not_evicted_and_a_new_one_is_refused() -> None:
    pool = SlotPool(CAPACITY)
    put(pool, "a", 4)
    pool.pin("a", "reader")
    assert pool.add("b", 5 * ALIGNMENT, "writer") is None
    assert "a" in pool
    pool.unpin_all("reader")
    assert pool.add("b", 5 * ALIGNMENT, "writer") is not None
    assert "a" not in pool


def test_a_payload_beyond_the_capacity_evicts_nothing() -> None:
    pool = SlotPool(CAPACITY)
    put(pool, "a", 1)
    assert pool.add("b", CAPACITY + 1, "writer") is None
    assert "a" in pool


def test_adjacent_free_extents_merge() -> None:
    pool = SlotPool(CAPACITY)
    for name in "abcd":
        put(pool, name, 2)
    for name in "bdca":
        pool.remove(name)
        check_invariants(pool)
    assert put(pool, "e", 8) is not None


def test_a_pinned_slot_is_not_removed() -> None:
    pool = SlotPool(CAPACITY)
    pool.add("a", 1, "writer")
    with pytest.raises(AssertionError, match="pinned"):
        pool.remove("a")
