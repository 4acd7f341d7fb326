"""A cache with a limit in bytes, the least recently used going first. Pure, and not thread-safe."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLRU(Generic[K, V]):
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0
        # Least recently used first: value and its size.
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Without being a use of it."""
        return key in self._entries

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Others make room for it; what is larger than the whole cache is not kept."""
        self.remove(key)
        if num_bytes > self.max_bytes:
            return
        while self.num_bytes + num_bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes

    def remove(self, key: K) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= entry[1]
