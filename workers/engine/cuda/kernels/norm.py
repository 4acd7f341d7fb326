"""RMSNorm (Zhang and Sennrich, 2019) as in Llama, alone or fused with the residual addition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.tiling import pad_to_power_of_two


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm over the last dimension of `x` [..., size], in its shape and dtype."""
    return _run(x, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # each [..., size]
    """Return the norm of `residual + x`, and the sum itself."""
    return _run(x, residual, weight, eps)


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # the norm and the sum, each [..., size]
    rows = x.reshape(-1, x.shape[-1])
    normed = torch.empty_like(rows)
    total = rows if residual is None else torch.empty_like(rows)
    num_rows, size = rows.shape
    size_pad = pad_to_power_of_two(size)
    _rms_norm[(num_rows,)](
        rows,
        rows if residual is None else residual.reshape(rows.shape),
        total,
        normed,
        weight,
        eps,
        SIZE=size,
        SIZE_PAD=size_pad,
        ADD=residual is not None,
        num_warps=min(max(size_pad // 512, 1), 8),
    )
    return normed.view(x.shape), total.view(x.shape)


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
