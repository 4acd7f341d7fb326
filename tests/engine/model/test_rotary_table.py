"""Rotary angles from a table are, bit for bit, the angles of transformers' module."""

from typing import Any

import pytest
import torch

from shared.models.registry import adapt
from tests.engine.model.test_parity import build
from workers.engine.model.rotary_table import FIRST_LEN, RotaryTable


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "qwen3_vl"])
def test_angles_are_those_of_the_module(name: str) -> None:
    """Also with axes at different positions, and at positions that the table has to grow for."""
    family = adapt(build(name).eval())
    module: Any = family.decoder.rotary_emb
    num_axes = family.num_position_rows
    table = RotaryTable(module, num_axes)
    for largest in (5, FIRST_LEN - 1, FIRST_LEN, 3 * FIRST_LEN, 17):
        generator = torch.Generator().manual_seed(largest)
        positions = torch.randint(0, largest + 1, (num_axes, 37), generator=generator)
        positions[:, 0] = largest
        expected = module(torch.empty(0), positions if num_axes == 1 else positions[:, None])
        for angles, of_module in zip(table.angles(positions), expected, strict=True):
            assert torch.equal(angles, of_module[0])
            assert angles.is_contiguous()
