"""Memory files that the renderer shares with a decoder: a file's bytes, and the decoded result.

Seals keep the decoder from changing the file's bytes, and from changing the size of the result,
which would kill the renderer by a signal when it reads there.
"""

import fcntl
import os


def make_source(data: bytes) -> int:
    """Return a descriptor of memory that contains `data` and cannot be changed."""
    descriptor = _make("pagemill-source")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        _seal(descriptor, fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_target(num_bytes: int) -> int:
    """Return a descriptor of memory of this size. Pages are allocated when they are written."""
    descriptor = _make("pagemill-target")
    try:
        os.truncate(descriptor, num_bytes)
        _seal(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _make(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _seal(descriptor: int, further: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | further)
