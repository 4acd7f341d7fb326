"""Helpers for launching kernels."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True if kernels run in Triton's interpreter on a CPU: TRITON_INTERPRET=1 before the import."""


def pad_to_power_of_two(size: int, minimum: int = 1) -> int:
    """Return the next power of two, at least `minimum`: ranges in a kernel have such sizes."""
    return max(minimum, 1 << (size - 1).bit_length())
