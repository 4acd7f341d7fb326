"""Settings of the C library's memory allocator."""

import contextlib
import ctypes
from collections.abc import Iterator

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


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Return the memory of large arrays to the system as soon as they are freed in the body.

    By default the C library keeps much of it. A process that copies each of its weights once would
    need twice their memory until it ends. The function does nothing with a C library without these
    settings.
    """
    library = ctypes.CDLL(None)
    has_settings = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    if has_settings:
        library.mallopt(_M_MMAP_THRESHOLD, _MIB)
    try:
        yield
    finally:
        if has_settings:
            # The C library itself raises the thresholds to these values at most.
            library.mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
            library.mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
            library.malloc_trim(0)
