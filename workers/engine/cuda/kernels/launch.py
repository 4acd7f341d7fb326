"""What every kernel's launch needs."""

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU: TRITON_INTERPRET=1 before the import."""


def pad(size: int, least: int = 1) -> int:
    """To a power of two, as the ranges of a kernel must be."""
    return max(least, 1 << (size - 1).bit_length())
