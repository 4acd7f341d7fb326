"""Gated SiLU of a feed-forward block (SwiGLU)."""

import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.tiling import pad_to_power_of_two

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return the SiLU of the first half of each row, times the second half."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    output = gate_up.new_empty(num_tokens, size)
    block = min(BLOCK, pad_to_power_of_two(size))
    _silu_mul[(num_tokens, triton.cdiv(size, block))](output, gate_up, SIZE=size, BLOCK=block)
    return output


@triton.jit
def _silu_mul(output, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    # Rounded to the model's dtype in between, as transformers does.
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + row * SIZE + i, (silu * up).to(dtype), mask=i < SIZE)
