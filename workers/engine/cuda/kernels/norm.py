"""RMSNorm (Zhang and Sennrich, 2019) as in Llama, alone or fused with the residual addition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.launch import pad_to_power_of_two


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm over the last dimension of `x` [..., size], in its shape and dtype."""
    rows = x.reshape(-1, x.shape[-1])
    normed = torch.empty_like(rows)
    _launch(rows, rows, rows, normed, weight, eps, add=False)
    return normed.view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # each [..., size]
    """Return the norm of `residual + x`, and the sum itself."""
    rows = x.reshape(-1, x.shape[-1])
    normed, total = torch.empty_like(rows), torch.empty_like(rows)
    _launch(rows, residual.reshape(rows.shape), total, normed, weight, eps, add=True)
    return normed.view(x.shape), total.view(x.shape)


def _launch(
    x: Tensor,
    residual: Tensor,
    total: Tensor,
    normed: Tensor,
    weight: Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    num_rows, size = x.shape
    size_pad = pad_to_power_of_two(size)
    _rms_norm[(num_rows,)](
        x,
        residual,
        total,
        normed,
        weight,
        eps,
        SIZE=size,
        SIZE_PAD=size_pad,
        ADD=add,
        num_warps=min(max(size_pad // 512, 1), 8),
    )


@triton.jit
def _rms_norm(
    x,
    residual,
    total,
    normed,
    weight,
    eps,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    ADD: tl.constexpr,
):
    i = tl.arange(0, SIZE_PAD)
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    dtype = normed.dtype.element_ty
    values = tl.load(x + at, mask=i < SIZE, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(residual + at, mask=i < SIZE, other=0.0).to(tl.float32) + values
        # The rounded sum is normalised, because it is also what later layers see.
        values = added.to(dtype).to(tl.float32)
        tl.store(total + at, values.to(dtype), mask=i < SIZE)
    scale = 1 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    factor = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    # Rounded to the model's dtype in between, as transformers does.
    result = (values * scale).to(dtype).to(tl.float32) * factor
    tl.store(normed + at, result.to(dtype), mask=i < SIZE)
