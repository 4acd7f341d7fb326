"""The memory allocator of the C library."""

import contextlib
import ctypes

# Parameters of mallopt(3). The limit of the first parameter is 32 MiB.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_MIB = 2**20


def keep_freed_memory(num_mib: int = 64) -> None:
    """Keep up to `num_mib` MiB of freed memory for the next arrays of this process.

    By default each large array gets new memory from Linux, which clears it page by page. A worker
    that repeatedly allocates arrays of the same sizes spends a third of its time on this. Does
    nothing with a C library that has no such setting.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, min(num_mib, 32) * _MIB)
        mallopt(_M_TRIM_THRESHOLD, num_mib * _MIB)
