"""Who has which bytes of a fixed area: named slots, and holders that pin them.

Pure bookkeeping; `shared.blobs.arena` has the memory. A slot that anybody pins stays where it is.
All the others are a cache: the least recently used slot gives its bytes to the next one.
"""

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field

ALIGNMENT = 4096
"""A page, so that a slot begins where a mapping of it could."""


@dataclass(slots=True)
class Slot:
    name: str
    offset: int
    num_bytes: int
    """Without what is lost to alignment."""
    pins: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        return max(-(-self.num_bytes // ALIGNMENT), 1) * ALIGNMENT


class SlotPool:
    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes, of which a remainder of a page is not used."""
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        # Least recently used first.
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        # Free extents (offset, size): sorted, apart from each other, none of them adjacent.
        self._free: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []
        self._names_of: dict[str, set[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Bytes in no slot."""
        return sum(size for _, size in self._free)

    @property
    def num_pinned(self) -> int:
        return sum(bool(slot.pins) for slot in self._slots.values())

    def add(self, name: str, num_bytes: int, holder: str) -> Slot | None:
        """A new slot, pinned by `holder`; None when what is pinned leaves no room for it.

        Others are evicted one by one, the least recently used first, until there is a place.
        """
        assert name not in self._slots, f"there is a slot {name} already"
        slot = Slot(name, 0, num_bytes)
        if slot.size > self.capacity:
            return None
        evictable = [other for other, s in self._slots.items() if not s.pins]
        if self.num_free + sum(self._slots[other].size for other in evictable) < slot.size:
            return None
        while (offset := self._take(slot.size)) is None:
            if not evictable:
                return None
            self.remove(evictable.pop(0))
        slot.offset = offset
        self._slots[name] = slot
        self._pin(name, holder)
        return slot

    def pin(self, name: str, holder: str) -> Slot | None:
        """The slot, which `holder` now keeps where it is; None if there is none of this name."""
        slot = self._slots.get(name)
        if slot is not None:
            self._slots.move_to_end(name)
            self._pin(name, holder)
        return slot

    def unpin(self, name: str, holder: str) -> None:
        """Nothing happens if there is no such slot, or the holder has not pinned it."""
        names = self._names_of.get(holder, set())
        if name in names:
            names.discard(name)
            self._slots[name].pins.discard(holder)
        if not names:
            self._names_of.pop(holder, None)

    def unpin_all(self, holder: str) -> None:
        for name in self._names_of.pop(holder, set()):
            self._slots[name].pins.discard(holder)

    def remove(self, name: str) -> None:
        """Give back the bytes of a slot that nobody pins."""
        slot = self._slots.pop(name)
        assert not slot.pins, f"slot {name} is pinned"
        self._give_back(slot.offset, slot.size)

    def clear(self) -> None:
        """Remove all that nobody pins."""
        for name in [name for name, slot in self._slots.items() if not slot.pins]:
            self.remove(name)

    def check(self) -> None:
        """Slots and free extents cover the area exactly once, and pins agree from both sides."""
        extents = sorted([*self._free, *((s.offset, s.size) for s in self._slots.values())])
        end = 0
        for offset, size in extents:
            assert offset == end, f"a gap or an overlap at {min(offset, end)}"
            end = offset + size
        assert end == self.capacity
        for (offset, size), (next_offset, _) in zip(self._free, self._free[1:], strict=False):
            assert offset + size < next_offset, "adjacent free extents"
        pins = {(name, holder) for name, s in self._slots.items() for holder in s.pins}
        assert pins == {(n, holder) for holder, names in self._names_of.items() for n in names}

    def _pin(self, name: str, holder: str) -> None:
        self._slots[name].pins.add(holder)
        self._names_of.setdefault(holder, set()).add(name)

    def _take(self, size: int) -> int | None:
        # The smallest extent that is large enough: large ones stay whole for large payloads.
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

    def _give_back(self, offset: int, size: int) -> None:
        index = bisect.bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            before, before_size = self._free.pop(index - 1)
            offset, size = before, before_size + size
            index -= 1
        self._free.insert(index, (offset, size))
