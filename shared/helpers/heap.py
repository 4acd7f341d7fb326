"""Settings of the C library's memory allocator."""

import contextlib
import ctypes

# Parameters of mallopt(3). The limit of the first parameter is 32 MiB.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_MIB = 2**20


def keep_freed_memory(num_mib: int = 64) -> None:
    """Keep up to `num_mib` of freed memory for the next arrays of this process.

    By default Linux maps new memory for each large array, and clears it page by page. This takes a
    third of the time of a worker that repeatedly creates arrays of the same sizes. The function
    does nothing with a C library without this setting.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, min(num_mib, 32) * _MIB)
        mallopt(_M_TRIM_THRESHOLD, num_mib * _MIB)
