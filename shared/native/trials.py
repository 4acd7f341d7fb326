"""Trials of products and attention: operations with a model's sizes, on artificial weights."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.native import choices
from shared.native.choices import NEVER, Implementation
from shared.native.matrices import PANEL, Format, PackedMatrix
from shared.native.measuring import Run, Trial
from shared.native.tower_kernels import TILE_ROWS, TOKEN_GROUP, TowerKernels, pack_weight

MAX_WEIGHTS = 2**19
"""Limit on weights. Larger products are tried with fewer outputs: the time is proportional."""
PRODUCT_ROWS = (256,)
"""Rows of a tower's products, as for a small image. More rows would only make each run longer."""
SEGMENT_ROWS = (64, 512)
"""Rows of a tower's segments, as for a window and for an image."""

CONTEXT = 512
"""Tokens in a trial of a decoder's attention. The times of all implementations grow with them."""

TorchAttention: TypeAlias = Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Tensor]


def decoder_product(
    kernels: TowerKernels,
    num_inputs: int,
    num_outputs: int,
    number: Format = Format.FULL,
    group_size: int = 0,
) -> Trial:
    """Return the trial of a decoder's product. Numbers have a scale for each group of inputs."""
    numbers = "" if number == Format.FULL else f"{number.name.lower()} by {group_size}"
    operation = choices.decoder_product(num_inputs, num_outputs, kernels.has_tiles, numbers)

    def prepare() -> Run:
        if number == Format.FULL:
            return _product(kernels, operation.rows, num_inputs, num_outputs)
        num_panels = _num_panels(num_inputs, num_outputs)
        num_bytes, num_groups = num_inputs // number.inputs_per_byte, -(-num_inputs // group_size)
        scales = torch.ones(num_panels, num_groups, PANEL)
        panels = torch.ones(num_panels, num_bytes, PANEL, dtype=torch.uint8)
        weights = PackedMatrix(panels, number, group_size, scales, torch.zeros_like(scales))
        x = torch.ones(max(*operation.rows, TILE_ROWS), num_inputs, dtype=torch.bfloat16)
        bias = torch.zeros(num_panels * PANEL)

        def run(implementation: Implementation, rows: int) -> Tensor:
            min_tile_rows = _min_tile_rows(implementation)
            return kernels.multiply(x[:rows], weights, bias, len(bias), min_tile_rows=min_tile_rows)

        return run

    return Trial(operation, prepare)


def decoder_attention(kernels: TowerKernels, head_dim: int) -> Trial:
    operation = choices.decoder_attention(head_dim, kernels.has_tiles)

    def prepare() -> Run:
        num_blocks, value_dim = CONTEXT // TOKEN_GROUP, -(-head_dim // PANEL) * PANEL
        query = torch.ones(max(operation.rows), head_dim, dtype=torch.bfloat16)
        keys = torch.ones(num_blocks, head_dim // 2, TOKEN_GROUP, 2, dtype=torch.bfloat16)
        values = torch.ones(num_blocks, TOKEN_GROUP // 2, value_dim, 2, dtype=torch.bfloat16)
        table = torch.arange(num_blocks, dtype=torch.int32)

        def run(implementation: Implementation, rows: int) -> Tensor:
            min_tile_rows = _min_tile_rows(implementation)
            return kernels.attend_cached(query[:rows], keys, values, table, CONTEXT, min_tile_rows)

        return run

    return Trial(operation, prepare)


def tower_product(
    kernels: TowerKernels,
    num_inputs: int,
    num_outputs: int,
    activation: str,
    in_torch: Callable[[Tensor], Tensor],
) -> Trial:
    """Return the trial of a tower's product. `in_torch` computes the activation with torch."""
    name = f"product {num_inputs} x {num_outputs} {activation}"
    operation = choices.tower_operation(name, PRODUCT_ROWS, kernels.has_tiles)
    return Trial(
        operation,
        lambda: _product(kernels, operation.rows, num_inputs, num_outputs, activation, in_torch),
    )


def tower_attention(
    kernels: TowerKernels, num_heads: int, head_dim: int, in_torch: TorchAttention
) -> Trial:
    """Return the trial of a tower's attention. `in_torch` computes it with torch, from query, key,
    value, lengths and scale."""
    name = f"attention {num_heads} x {head_dim}"
    operation = choices.tower_operation(name, SEGMENT_ROWS, kernels.has_tiles)

    def prepare() -> Run:
        inputs = torch.ones(max(operation.rows), 3, num_heads, head_dim, dtype=torch.bfloat16)

        def run(implementation: Implementation, rows: int) -> Tensor:
            query, key, value = inputs[:rows].unbind(1)
            scale = head_dim**-0.5
            if implementation == "torch":
                return in_torch(query, key, value, [rows], scale)
            starts, min_tile_rows = torch.tensor([0, rows]), _min_tile_rows(implementation)
            return kernels.attend(query, key, value, None, starts, scale, min_tile_rows)

        return run

    return Trial(operation, prepare)


def _product(
    kernels: TowerKernels,
    rows: Sequence[int],
    num_inputs: int,
    num_outputs: int,
    activation: str = "none",
    in_torch: Callable[[Tensor], Tensor] = lambda x: x,
) -> Run:
    num_outputs = min(num_outputs, _num_panels(num_inputs, num_outputs) * PANEL)
    inputs = torch.ones(max(*rows, TILE_ROWS), num_inputs, dtype=torch.bfloat16)
    weight = torch.full((num_outputs, num_inputs), 1 / num_inputs, dtype=torch.bfloat16)
    packed = PackedMatrix(pack_weight(weight))
    bias = torch.zeros(-(-num_outputs // PANEL) * PANEL)
    torch_bias = torch.zeros(num_outputs, dtype=torch.bfloat16)

    def run(implementation: Implementation, rows: int) -> Tensor:
        x = inputs[:rows]
        if implementation == "torch":
            return in_torch(F.linear(x, weight, torch_bias))
        min_tile_rows = _min_tile_rows(implementation)
        return kernels.multiply(x, packed, bias, num_outputs, activation, min_tile_rows)

    return run


def _num_panels(num_inputs: int, num_outputs: int) -> int:
    return min(max(MAX_WEIGHTS // num_inputs // PANEL, 1), -(-num_outputs // PANEL))


def _min_tile_rows(implementation: Implementation) -> int:
    return 1 if implementation == "tiles" else NEVER
