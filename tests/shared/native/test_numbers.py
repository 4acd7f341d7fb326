"""Products with weights of 8 and 4 bits against numpy in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.native import library
from shared.native.choices import NEVER
from shared.native.matrices import FP8_SCALE, PANEL, Format, PackedMatrix, pack_rows
from shared.native.tower_kernels import TowerKernels
from tests.quantized_checkpoints import E4M3, values_of
from tests.shared.native.test_tower_kernels import needs_kernels

NUMBERS = [Format.INT8, Format.FP8, Format.INT4, Format.INT4_ZEROS]
# Inputs, outputs and inputs of a group: whole channels, groups, and a last group that is smaller.
SHAPES = [(64, 40, 64), (96, 33, 64), (1088, 64, 1088), (640, 31, 128), (32, 1, 32)]
# One row to more than the kernels convert in registers, and more than they have sums for at once.
ROWS = [1, 5, 12, 13, 40, 400]

pytestmark = needs_kernels


def make_numbers(
    number: Format, num_outputs: int, num_inputs: int, group_size: int
) -> tuple[PackedMatrix, np.ndarray]:
    """Return packed random numbers, and their values."""
    rng = np.random.default_rng(num_inputs + num_outputs)
    num_groups = -(-num_inputs // group_size)
    scales = rng.uniform(0.01, 0.1, (num_outputs, num_groups)).astype(np.float32)
    zeros = np.zeros_like(scales)
    if number in (Format.INT4, Format.INT4_ZEROS):
        codes = rng.integers(0, 16, (num_outputs, num_inputs), np.uint8)
        stored, values = codes[:, 0::2] | codes[:, 1::2] << 4, codes.astype(np.float64) - 8
    else:
        stored = rng.integers(0, 256, (num_outputs, num_inputs), np.uint8)
        stored[stored & 127 == 127] = 0
        is_int8 = number == Format.INT8
        values = stored.view(np.int8).astype(np.float64) if is_int8 else values_of(E4M3, stored)
    if number == Format.INT4_ZEROS:
        zeros = rng.integers(-8, 9, scales.shape).astype(np.float32)
    spread = np.arange(num_inputs) // group_size
    values = (values - zeros[:, spread]) * scales[:, spread].astype(np.float64)
    factor = FP8_SCALE if number == Format.FP8 else 1
    packed = PackedMatrix(
        pack_rows(torch.from_numpy(stored)),
        number,
        group_size,
        pack_rows(torch.from_numpy(scales * np.float32(factor))),
        pack_rows(torch.from_numpy(zeros)) if number == Format.INT4_ZEROS else None,
    )
    return packed, values


def check_products(
    kernels: TowerKernels,
    number: Format,
    shape: tuple[int, int, int],
    rows: list[int],
    min_tile_rows: int,
) -> None:
    num_inputs, num_outputs, group_size = shape
    packed, values = make_numbers(number, num_outputs, num_inputs, group_size)
    assert packed.num_inputs == num_inputs
    torch.manual_seed(num_inputs)
    bias = F.pad(torch.randn(num_outputs), (0, -num_outputs % PANEL))
    for num_rows in rows:
        x = torch.randn(num_rows, num_inputs).bfloat16()
        actual = kernels.multiply(x, packed, bias, num_outputs, min_tile_rows=min_tile_rows)
        products: Tensor = x.double() @ torch.from_numpy(values).T + bias[:num_outputs]
        # The result is rounded by at most 2**-9, and sums have the error of float32.
        size = float(products.abs().mean())
        torch.testing.assert_close(actual.double(), products, rtol=4e-3, atol=1e-5 * size)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_numbers_have_the_products_of_their_values(
    number: Format, shape: tuple[int, int, int], num_threads: int
) -> None:
    loaded = library.load()
    assert loaded is not None
    check_products(TowerKernels(loaded, num_threads), number, shape, ROWS, NEVER)
