"""Values of quantized weights, computed one weight at a time while a model is loaded."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from shared.vision.formats import Contradiction, Packing, QuantizedWeight
from shared.vision.quantized import Quantized
from shared.vision.weight_files import list_model_files

# Numbers that are computed at a time. Their float32 copies are small compared with a weight.
CHUNK_LEN = 1 << 20
# Values of the 4-bit floats with a sign, two bits of exponent and one of mantissa.
_E2M1 = [sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
# Types in which numbers are kept, by their type in safetensors.
_NUMBER_TYPES = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.uint8}
MIDDLE = 8
"""The 4-bit number for 0, unless a group has another zero."""
# No integer holds more numbers than this, and chunks do not divide integers.
MAX_PACKED = 32


def open_weights(folder: Path, quantized: Quantized, dtype: torch.dtype) -> dict[str, Any]:
    """Return all weights of a folder by name. Each is read, and dequantized, when it is indexed.

    A file is closed with its last weight: after an error, threads of transformers still read.
    """
    files: dict[str, Any] = {}
    for path in list_model_files(folder):
        file: Any = safe_open(path, framework="pt")
        files |= dict.fromkeys(file.keys(), file)
    weights: dict[str, Any] = {
        name: file.get_slice(name) for name, file in files.items() if name not in quantized.claimed
    }
    for weight in quantized.weights:
        weights[weight.name] = StoredWeight(weight, files, dtype)
    return weights


class StoredWeight:
    """A quantized weight of a file, in the form in which transformers reads unquantized ones."""

    def __init__(
        self, weight: QuantizedWeight, files: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        self._weight, self._files, self._dtype = weight, files, dtype
        self._is_kept = False

    def __getitem__(self, index: EllipsisType) -> Tensor:
        if self._is_kept:
            return read_numbers(self._weight, self._read)
        return dequantize(self._weight, self._read, self._dtype)

    def keep(self) -> "KeptNumbers | None":
        """Return the numbers instead of the values from now on, if products can read their form.

        Raises Contradiction.
        """
        dtype = self._files[self._weight.numbers].get_slice(self._weight.numbers).get_dtype()
        numbers = describe_numbers(self._weight, dtype, self._read)
        self._is_kept = numbers is not None
        return numbers

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def dequantize(
    weight: QuantizedWeight, read: Callable[[str], Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the values of a weight. Raises Contradiction.

    They are computed in float32, or in float64 for that `dtype`, and rounded once.
    """
    exact = torch.promote_types(dtype, torch.float32)
    *stack, rows, columns = _stored_shape(weight)
    scales, zeros = _read_grids(weight, read, exact)
    row_groups, column_groups = _read_groups(weight, rows, columns, read)

    def spread(values: Tensor, part: slice) -> Tensor:
        return values[row_groups[part]][:, column_groups]

    values = torch.empty(weight.shape, dtype=dtype)
    matrices = values.view(-1, *values.shape[-2:])
    targets = matrices.mT if weight.is_transposed else matrices
    numbers = read(weight.numbers).flatten(len(stack) + 1)
    numbers = numbers.view(-1, *numbers.shape[-2:])
    step = _rows_at_once(columns)
    for target, matrix, scale, zero in zip(targets, numbers, scales, zeros, strict=True):
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            exact_values = _read_numbers(weight, matrix, part).to(exact)
            exact_values = (exact_values - spread(zero, part)).mul_(spread(scale, part))
            target[part] = exact_values
            if not target[part].isfinite().all():
                raise Contradiction(f"{weight.name} has values that are not finite in {dtype}")
    return values


class KeptNumbers(NamedTuple):
    """Form of a weight [out, in] of kept numbers: a value is `(number - zero) * scale`."""

    dtype: torch.dtype
    """Type of the numbers; uint8 for two 4-bit numbers of adjacent inputs in each byte, the first
    one in the lower bits. They stand for values from -MIDDLE."""
    group_size: int
    """Number of inputs that share a scale."""
    scale: Tensor  # [out, num_groups] float32
    zero: Tensor | None  # the same


def describe_numbers(
    weight: QuantizedWeight, dtype: str, read: Callable[[str], Tensor]
) -> KeptNumbers | None:
    """Return the form of numbers of this type, in safetensors' words; None for other forms.

    Raises Contradiction.
    """
    if not weight.can_keep(dtype):
        return None
    form, num_outputs = _NUMBER_TYPES[dtype], weight.shape[0]
    high = weight.block[1 if weight.is_transposed else 0]
    rows, columns = _stored_shape(weight)
    _read_groups(weight, rows, columns, read)
    scale, zero = (
        (grid.mT if weight.is_transposed else grid)[0].repeat_interleave(high, 0)[:num_outputs]
        for grid in _read_grids(weight, read, torch.float32)
    )
    if form == torch.uint8:
        zero = zero - MIDDLE
    if not (scale.isfinite().all() and zero.isfinite().all()):
        return None
    return KeptNumbers(form, weight.group_size, scale.contiguous(), zero if zero.any() else None)


def read_numbers(weight: QuantizedWeight, read: Callable[[str], Tensor]) -> Tensor:
    """Return the numbers of a weight in the form that `describe_numbers` states."""
    matrix = read(weight.numbers)
    if weight.packing is None:
        if matrix.dtype == torch.float8_e4m3fn and (matrix.view(torch.uint8) & 127 == 127).any():
            raise Contradiction(f"{weight.name} has values that are not finite")
        return matrix
    rows, columns = _stored_shape(weight)
    numbers = torch.empty(rows, columns, dtype=torch.uint8)
    step = _rows_at_once(columns)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        numbers[part] = _read_numbers(weight, matrix, part)
    if weight.is_transposed:
        numbers = numbers.mT.contiguous()
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _read_grids(
    weight: QuantizedWeight, read: Callable[[str], Tensor], exact: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the scales and zeros of the blocks [stack, blocks of rows, blocks of columns]."""
    *stack, rows, columns = _stored_shape(weight)
    high, wide = weight.block
    grid = (math.prod(stack), -(-rows // high), -(-columns // wide))
    scales = _read_scales(read(weight.scales)).to(exact).reshape(grid)
    zeros = torch.tensor(weight.zero, dtype=exact).expand(grid)
    if weight.zeros is not None:
        stored = read(weight.zeros)
        if weight.zero_packing is not None:
            stored = _unpack(stored, weight.zero_packing, weight.zero)[: grid[1], : grid[2]]
        zeros = stored.to(exact).reshape(grid)
    return scales, zeros


def _rows_at_once(columns: int) -> int:
    return max(1, CHUNK_LEN // columns // MAX_PACKED) * MAX_PACKED


def _stored_shape(weight: QuantizedWeight) -> list[int]:
    """Return the shape of the numbers once they are unpacked."""
    *stack, rows, columns = weight.shape
    return [*stack, columns, rows] if weight.is_transposed else weight.shape


def _read_groups(
    weight: QuantizedWeight, rows: int, columns: int, read: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the index of the block of each row and each column."""
    if weight.true_shape is not None and read(weight.true_shape).tolist() != weight.shape:
        raise Contradiction(
            f"{weight.true_shape} is {read(weight.true_shape).tolist()}, but {weight.numbers} has"
            f" the numbers of {weight.shape}"
        )
    high, wide = weight.block
    by_row, by_column = torch.arange(rows) // high, torch.arange(columns) // wide
    if weight.groups is None:
        return by_row, by_column
    groups = read(weight.groups).long()
    ordered = by_row if weight.is_transposed else by_column
    if groups.min() < 0 or groups.max() > ordered[-1]:
        raise Contradiction(
            f"{weight.groups} names the group {int(groups.max())}, but there are"
            f" {int(ordered[-1]) + 1} groups"
        )
    if weight.is_ordered and not torch.equal(groups, ordered):
        raise Contradiction(f"{weight.groups} orders the inputs, but desc_act is false")
    return (groups, by_column) if weight.is_transposed else (by_row, groups)


def _read_scales(scales: Tensor) -> Tensor:
    if scales.dtype == torch.uint8:  # A byte is the exponent of a power of two.
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float() if scales.itemsize == 1 else scales


def _read_numbers(weight: QuantizedWeight, matrix: Tensor, part: slice) -> Tensor:
    """Return the numbers of some rows of a matrix."""
    packing = weight.packing
    if packing is None:
        return matrix[part]
    per_row = len(packing.shifts) if packing.axis == 0 else 1
    numbers = _unpack(matrix[part.start // per_row : part.stop // per_row], packing)
    return torch.tensor(_E2M1)[numbers] if weight.is_e2m1 else numbers


def _unpack(integers: Tensor, packing: Packing, added: int = 0) -> Tensor:
    """Return the numbers of a matrix of integers, with an addition that stays within their bits."""
    shifts = torch.tensor(packing.shifts, dtype=torch.int32)
    mask = (1 << packing.bits) - 1
    integers = integers.to(torch.int32)
    if packing.axis == 0:
        return ((integers[:, None, :] >> shifts[:, None]) + added & mask).flatten(0, 1)
    return ((integers[:, :, None] >> shifts) + added & mask).flatten(1, 2)
