"""Allocation of a fixed area: named slots, and holders that pin them.

This module does the bookkeeping; `shared.blobs.arena` has the memory. Pinned slots stay in place.
The other slots are a cache, and the least recently used slot is evicted first.
"""

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field

ALIGNMENT = 4096
"""The page size, so that each slot could be mapped separately."""


@dataclass(slots=True)
class Slot:
    """A named range of the area."""

    name: str
    offset: int
    num_bytes: int
    """Length of the payload, without padding."""
    pins: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Length of the range: the payload and its padding."""
        return max(-(-self.num_bytes // ALIGNMENT), 1) * ALIGNMENT


class SlotPool:
    """All slots of one area, and its free extents."""

    def __init__(self, capacity: int) -> None:
        """Manage `capacity` bytes, rounded down to whole pages."""
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        # Least recently used first.
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        # Free extents (offset, size): sorted, disjoint, and none of them adjacent.
        self._free: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []
        self._names_of: dict[str, set[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Number of bytes outside of slots."""
        return sum(size for _, size in self._free)

    @property
    def num_pinned(self) -> int:
        return sum(bool(slot.pins) for slot in self._slots.values())

    def add(self, name: str, num_bytes: int, holder: str) -> Slot | None:
        """Add a slot pinned by `holder`. Return None if the pinned slots leave no room for it.

        Other slots are evicted one by one, the least recently used first, until there is room.
        """
        assert name not in self._slots, f"slot {name} exists already"
        slot = Slot(name, 0, num_bytes)
        if slot.size > self.capacity:
            return None
        evictable = [other for other, s in self._slots.items() if not s.pins]
        if self.num_free + sum(self._slots[other].size for other in evictable) < slot.size:
            return None
        while (offset := self._allocate(slot.size)) is None:
            if not evictable:
                return None
            self.remove(evictable.pop(0))
        slot.offset = offset
        self._slots[name] = slot
        self._pin(name, holder)
        return slot

    def pin(self, name: str, holder: str) -> Slot | None:
        """Pin the slot with this name for `holder` and return it; None if there is none."""
        slot = self._slots.get(name)
        if slot is not None:
            self._slots.move_to_end(name)
            self._pin(name, holder)
        return slot

    def unpin(self, name: str, holder: str) -> None:
        """Remove the holder's pin from a slot, if both exist."""
        names = self._names_of.get(holder, set())
        if name in names:
            names.discard(name)
            self._slots[name].pins.discard(holder)
        if not names:
            self._names_of.pop(holder, None)

    def unpin_all(self, holder: str) -> None:
        """Remove all pins of a holder."""
        for name in self._names_of.pop(holder, set()):
            self._slots[name].pins.discard(holder)

    def remove(self, name: str) -> None:
        """Remove a slot without pins."""
        slot = self._slots.pop(name)
        assert not slot.pins, f"slot {name} is pinned"
        self._free_extent(slot.offset, slot.size)

    def clear(self) -> None:
        """Remove all slots without pins."""
        for name in [name for name, slot in self._slots.items() if not slot.pins]:
            self.remove(name)

    def _pin(self, name: str, holder: str) -> None:
        self._slots[name].pins.add(holder)
        self._names_of.setdefault(holder, set()).add(name)

    def _allocate(self, size: int) -> int | None:
        # Best fit, so that large extents stay whole for large payloads.
        fitting = [(have, offset) for offset, have in self._free if have >= size]
        if not fitting:
            return None
        have, offset = min(fitting)
        index = bisect.bisect_left(self._free, (offset, 0))
        if have == size:
            del self._free[index]
        else:
            self._free[index] = (offset + size, have - size)
        return offset

    def _free_extent(self, offset: int, size: int) -> None:
        index = bisect.bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            before, before_size = self._free.pop(index - 1)
            offset, size = before, before_size + size
            index -= 1
        self._free.insert(index, (offset, size))
