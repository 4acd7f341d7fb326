"""Helpers for launching kernels."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter on a CPU: TRITON_INTERPRET=1 before the import."""


def pad_to_power_of_two(size: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`: ranges in a kernel have such sizes."""
    return max(least, 1 << (size - 1).bit_length())
