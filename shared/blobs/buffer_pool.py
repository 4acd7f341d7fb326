"""Memory to receive into, used again: a fresh allocation of 32 MiB is five times slower to fill."""

import mmap
from collections import defaultdict

MIN_SIZE = 64 * 2**10


class BufferPool:
    """Page aligned; keeps what is given back, up to `max_bytes`, and makes nothing larger."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept_bytes = 0
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def acquire(self, num_bytes: int) -> mmap.mmap:
        """At least `num_bytes` long; what it contains is not defined. Raises ValueError for more
        than the pool may keep: who says how large a blob is may be lying."""
        if num_bytes > self._max_bytes:
            raise ValueError(f"{num_bytes} bytes are over the limit of {self._max_bytes}")
        size = max(MIN_SIZE, 1 << max(num_bytes - 1, 0).bit_length())
        if not self._free[size]:
            return mmap.mmap(-1, size)
        self._kept_bytes -= size
        return self._free[size].pop()

    def release(self, buffer: mmap.mmap) -> None:
        """Nobody may look at it any more."""
        if self._kept_bytes + len(buffer) <= self._max_bytes:
            self._kept_bytes += len(buffer)
            self._free[len(buffer)].append(buffer)
