"""The memory allocator of the C library."""

import contextlib
import ctypes

# Numbers of parameters of mallopt(3). The first one's limit is 32 MiB.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_MIB = 2**20


def keep_freed_memory(num_mib: int = 64) -> None:
    """Keep so much freed memory for the next arrays, in this process.

    By default each large array gets memory of its own from Linux, which clears it page by page. A
    worker that makes arrays of the same sizes again and again spends a third of its time so. Does
    nothing with a C library that has no such setting.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, min(num_mib, 32) * _MIB)
        mallopt(_M_TRIM_THRESHOLD, num_mib * _MIB)
