"""Times of the engine's kernels and of torch's, on the same data."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from ops.gpu.timing import time_call
from workers.engine.cuda.kernels.activation import silu_mul
from workers.engine.cuda.kernels.attention import paged_attention
from workers.engine.cuda.kernels.norm import add_rms_norm
from workers.engine.cuda.kernels.plan import plan_for_kernels
from workers.engine.cuda.kernels.tiling import Tiling

BLOCK_SIZE = 16
# Torch's paged attention supports this size on every chip.
PAGE_SIZE = 256


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Figure:
    """Seconds of our kernel and of others; a text replaces a number that could not be measured."""

    name: str
    ours_s: float
    others_s: dict[str, float | str]
    num_bytes: int
    num_flops: int = 0


@dataclass(frozen=True)
class Span:
    """Sequences of a step: their number, and the cached and the new tokens of each."""

    num_seqs: int
    past: int
    new: int


def measure_attention(heads: Heads, span: Span, dtype: torch.dtype, device: torch.device) -> Figure:
    torch.manual_seed(0)
    seq_len = span.past + span.new
    num_blocks = -(-seq_len // BLOCK_SIZE)
    order = torch.randperm(span.num_seqs * num_blocks).view(span.num_seqs, num_blocks).tolist()
    shape = (span.num_seqs * num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    num_tokens = span.num_seqs * span.new
    query = torch.randn(num_tokens, heads.num_heads, heads.head_dim, device=device).to(dtype)
    plan = plan_for_kernels(
        order,
        list(range(0, num_tokens + 1, span.new)),
        [seq_len] * span.num_seqs,
        block_size=BLOCK_SIZE,
        tiling=Tiling.of(heads.num_heads, [(heads.num_kv_heads, heads.head_dim)], dtype),
        device=device,
    )
    scale = heads.head_dim**-0.5
    row_bytes = heads.head_dim * dtype.itemsize
    visible = span.num_seqs * sum(span.past + j + 1 for j in range(span.new))
    return Figure(
        f"{heads.name}: {span.num_seqs} x {span.new} after {span.past}",
        time_call(lambda: paged_attention(query, keys, values, plan, scale), device),
        _peers(query, heads, span, dtype),
        2 * span.num_seqs * seq_len * heads.num_kv_heads * row_bytes
        + 2 * num_tokens * heads.num_heads * row_bytes,
        4 * visible * heads.num_heads * heads.head_dim,
    )


def _peers(query: Tensor, heads: Heads, span: Span, dtype: torch.dtype) -> dict[str, float | str]:
    device, seq_len = query.device, span.past + span.new
    row = (heads.num_kv_heads, heads.head_dim)
    starts = span.new * torch.arange(span.num_seqs + 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((span.num_seqs,), seq_len, dtype=torch.int32, device=device)
    num_pages = -(-seq_len // PAGE_SIZE)
    key_pages, value_pages = (
        torch.randn(span.num_seqs * num_pages, PAGE_SIZE, *row, device=device).to(dtype)
        for _ in range(2)
    )
    table = torch.arange(span.num_seqs * num_pages, dtype=torch.int32, device=device)

    def varlen() -> object:
        return varlen_attn(
            query,
            key_pages,
            value_pages,
            starts,
            None,
            span.new,
            seq_len,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=seq_lens,
            block_table=table.view(span.num_seqs, num_pages),
        )

    # This has no pages, and serves a decode or a prompt only: its mask begins at the first key.
    keys, values = (
        torch.randn(span.num_seqs, seq_len, *row, device=device).to(dtype).transpose(1, 2)
        for _ in range(2)
    )
    queries = query.view(span.num_seqs, span.new, *query.shape[1:]).transpose(1, 2)

    def sdpa() -> object:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=span.new > 1, enable_gqa=True
        )

    others = {"varlen_attn, paged": _try(varlen, device)}
    if span.new == 1 or span.past == 0:
        others["SDPA, not paged"] = _try(sdpa, device)
    return others


def _try(call: Callable[[], object], device: torch.device) -> float | str:
    """Time a call of a peer, or return its error: a build of torch may lack it in any way."""
    try:
        return time_call(call, device)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:60]


def measure_elementwise(
    num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> list[Figure]:
    x, residual = (torch.randn(num_tokens, hidden_size, device=device).to(dtype) for _ in range(2))
    weight = torch.ones(hidden_size, device=device, dtype=dtype)
    gate_up = torch.randn(num_tokens, 4 * hidden_size, device=device).to(dtype)
    gate, up = gate_up.chunk(2, dim=1)
    return [
        Figure(
            f"add and RMSNorm, {num_tokens} x {hidden_size}",
            time_call(lambda: add_rms_norm(x, residual, weight, 1e-6), device),
            {"torch": time_call(lambda: F.rms_norm(x + residual, (hidden_size,), weight), device)},
            4 * x.nbytes,
        ),
        Figure(
            f"SiLU-mul, {num_tokens} x {2 * hidden_size}",
            time_call(lambda: silu_mul(gate_up), device),
            {"torch": time_call(lambda: F.silu(gate) * up, device)},
            gate_up.nbytes * 3 // 2,
        ),
    ]
