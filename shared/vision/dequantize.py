"""Values of quantized weights, computed one weight at a time while a model is loaded."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

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
        weights[weight.name] = _LazyWeight(weight, files, dtype)
    return weights


class _LazyWeight:
    """A quantized weight of a file, in the form in which transformers reads unquantized ones."""

    def __init__(
        self, weight: QuantizedWeight, files: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        self._weight, self._files, self._dtype = weight, files, dtype

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return dequantize(self._weight, self._read, self._dtype)

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
    high, wide = weight.block
    grid = (math.prod(stack), -(-rows // high), -(-columns // wide))
    scales = _read_scales(read(weight.scales)).to(exact).reshape(grid)
    zeros = torch.tensor(weight.zero, dtype=exact).expand(grid)
    if weight.zeros is not None:
        stored = read(weight.zeros)
        if weight.zero_packing is not None:
            stored = _unpack(stored, weight.zero_packing, weight.zero)[: grid[1], : grid[2]]
        zeros = stored.to(exact).reshape(grid)
    row_groups, column_groups = _read_groups(weight, rows, columns, read)

    def spread(values: Tensor, part: slice) -> Tensor:
        return values[row_groups[part]][:, column_groups]

    values = torch.empty(weight.shape, dtype=dtype)
    matrices = values.view(-1, *values.shape[-2:])
    targets = matrices.mT if weight.is_transposed else matrices
    numbers = read(weight.numbers).flatten(len(stack) + 1)
    numbers = numbers.view(-1, *numbers.shape[-2:])
    step = max(1, CHUNK_LEN // columns // MAX_PACKED) * MAX_PACKED
    for target, matrix, scale, zero in zip(targets, numbers, scales, zeros, strict=True):
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            exact_values = _read_numbers(weight, matrix, part).to(exact)
            exact_values = (exact_values - spread(zero, part)).mul_(spread(scale, part))
            target[part] = exact_values
            if not target[part].isfinite().all():
                raise Contradiction(f"{weight.name} has values that are not finite in {dtype}")
    return values


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
