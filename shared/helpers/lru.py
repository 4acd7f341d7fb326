"""LRU cache with a limit in bytes. It is not thread-safe."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLRU(Generic[K, V]):
    """Cache that evicts the least recently used entries beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0
        # Values and their sizes, least recently used first.
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Return whether `key` is cached, without marking it as used."""
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Return the cached value and mark it as used; None if `key` is not cached."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Cache a value, and evict others for it. A value larger than the cache is not stored."""
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
