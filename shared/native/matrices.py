"""Weights in the layout of the C++ kernels: panels of 32 outputs, in full or as numbers."""

import ctypes
import enum
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from shared.native import library

PANEL = 32
"""Number of outputs that are packed together."""
FP8_SCALE = 256
"""The kernels' 8-bit floats are smaller than their values by this factor."""


class Format(enum.IntEnum):
    """Number format of a matrix. The values equal the ones in numbers.h."""

    FULL = 0
    INT8 = 1
    FP8 = 2
    INT4 = 3
    INT4_ZEROS = 4

    @property
    def inputs_per_byte(self) -> int:
        return 2 if self in (Format.INT4, Format.INT4_ZEROS) else 1


class Matrix(ctypes.Structure):
    """Addresses of packed weights, as numbers.h has them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "zeros")),
        *((name, ctypes.c_int32) for name in ("format", "group_size")),
    )
    panels: int | None
    scales: int | None
    zeros: int | None
    format: int
    group_size: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Packed weights in tensors."""

    panels: Tensor
    """[num_panels, num_inputs / 2, 32, 2] bfloat16, or [num_panels, num_bytes, 32] bytes with one
    or two inputs each."""
    format: Format = Format.FULL
    group_size: int = 0
    """Number of inputs that share a scale."""
    scales: Tensor | None = None  # [num_panels, num_groups, 32] float32
    zeros: Tensor | None = None  # the same

    @property
    def num_inputs(self) -> int:
        per_item = 2 if self.format == Format.FULL else self.format.inputs_per_byte
        return per_item * self.panels.shape[1]

    @property
    def addresses(self) -> Matrix:
        pointers = library.pointers(self.panels, self.scales, self.zeros)
        return Matrix(*pointers, self.format, self.group_size)


def pack_rows(rows: Tensor) -> Tensor:
    """Pack rows of outputs [num_outputs, num_items] as linear.h expects them.

    The result is [num_panels, num_items, 32].
    """
    padded = F.pad(rows.detach(), (0, 0, 0, -len(rows) % PANEL))
    return padded.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()
