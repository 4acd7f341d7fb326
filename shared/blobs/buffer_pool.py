"""Reusable receive buffers: filling a fresh allocation of 32 MiB takes five times as long."""

import mmap
from collections import defaultdict

MIN_SIZE = 64 * 2**10


class BufferPool:
    """Page-aligned buffers. Released ones are reused, up to `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._free_bytes = 0
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def acquire(self, num_bytes: int) -> mmap.mmap:
        """Return a buffer of at least `num_bytes` with undefined content.

        Raises ValueError for more than `max_bytes`, because a peer may lie about a blob's size.
        """
        if num_bytes > self._max_bytes:
            raise ValueError(f"{num_bytes} bytes are over the limit of {self._max_bytes}")
        size = max(MIN_SIZE, 1 << max(num_bytes - 1, 0).bit_length())
        if not self._free[size]:
            return mmap.mmap(-1, size)
        self._free_bytes -= size
        return self._free[size].pop()

    def release(self, buffer: mmap.mmap) -> None:
        """Return a buffer, which must not be used afterwards."""
        if self._free_bytes + len(buffer) <= self._max_bytes:
            self._free_bytes += len(buffer)
            self._free[len(buffer)].append(buffer)
