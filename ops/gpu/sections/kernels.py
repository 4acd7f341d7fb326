"""Each kernel against float64 on fresh inputs, with NaN in foreign slots and unwritten outputs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.gpu.session import Session
from workers.engine.cuda.kernels.activation import silu_mul
from workers.engine.cuda.kernels.attention import paged_attention
from workers.engine.cuda.kernels.norm import add_rms_norm
from workers.engine.cuda.kernels.plan import plan_for_kernels
from workers.engine.cuda.kernels.rotary import HeadNorm, Rotary, rotate_and_write
from workers.engine.cuda.kernels.tiling import Tiling

EPS = 1e-6
NUM_POSITIONS = 4096
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Spans = list[tuple[int, int]]
FEW: Spans = [(40, 1), (0, 1), (17, 3)]
MIXED: Spans = [(0, 700), (1000, 513), (4095, 1), (31, 1), (16, 16), (5, 40)]


def run(session: Session) -> None:
    seed = int.from_bytes(os.urandom(4))
    torch.manual_seed(seed)
    session.add("seed", seed=seed, share=session.share)
    for what, call in session.share_of(_items(session)):
        session.attempt(what, call)


def _items(session: Session) -> list[tuple[str, Callable[[], None]]]:
    sizes = [(64, 2)] if session.dry else [(576, 5), (1536, 300), (3584, 8192), (8192, 7)]
    items: list[tuple[str, Callable[[], None]]] = [
        (f"norm and activation {num_rows} x {size}", partial(check_rows, session, size, num_rows))
        for size, num_rows in sizes
    ]
    shapes = [(12, 2, 128, False), (32, 8, 128, True), (9, 3, 64, False), (32, 32, 96, False)]
    for shape in [(4, 2, 16, True)] if session.dry else shapes:
        items.append((f"rotary {shape}", partial(check_rotary, session, *shape)))
    tiny = [AttentionCase("few", 4, 2, 64, FEW, torch.float32)]
    for case in tiny if session.dry else attention_cases():
        items.append((f"attention {case.name}", partial(check_attention, session, case)))
    return items


# -- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCase:
    """Sequences of a step, each with the tokens cached before it and its new tokens."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    spans: Spans
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    block_size: int = 16


def attention_cases() -> list[AttentionCase]:
    many = [(int(past), 1) for past in torch.randint(0, 900, (300,))]
    cases = [
        AttentionCase("decodes, few", 12, 2, 128, FEW),
        AttentionCase("mixed", 28, 4, 128, MIXED),
        AttentionCase("300 decodes", 28, 4, 128, many),
        AttentionCase("32k", 28, 4, 128, [(32767, 1), (3, 1)]),
        AttentionCase("chunk at 16k", 12, 2, 128, [(16000, 300)]),
        AttentionCase("group 8", 64, 8, 128, MIXED),
        AttentionCase("group 4", 32, 8, 128, MIXED),
        AttentionCase("group 2", 16, 8, 128, MIXED),
        AttentionCase("group 1", 32, 32, 128, MIXED),
        AttentionCase("size 64", 32, 8, 64, MIXED),
        AttentionCase("size 64, group 3", 9, 3, 64, MIXED),
        AttentionCase("size 96", 32, 32, 96, MIXED),
        AttentionCase("size 256", 8, 4, 256, MIXED),
        AttentionCase("size 80, fp16", 14, 2, 80, MIXED, torch.float16),
        AttentionCase("window", 32, 8, 128, MIXED, window=100),
        AttentionCase("window and softcap", 16, 8, 256, MIXED, window=400, softcap=50.0),
        AttentionCase("blocks of 8", 12, 2, 128, MIXED, block_size=8),
        AttentionCase("blocks of 1", 12, 2, 64, FEW, block_size=1),
        AttentionCase("blocks of 256", 12, 2, 64, MIXED, block_size=256),
        AttentionCase("decodes, fp32", 12, 2, 128, FEW[:2], torch.float32),
        AttentionCase("fp32", 12, 2, 64, MIXED, torch.float32),
    ]
    # The shapes of `serving`, so that several processes compile its kernels.
    for num_heads, num_kv_heads in ((28, 4), (12, 2)):
        for number in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            spans = [(37 * i % 300, 1) for i in range(number)]
            name = f"{num_heads} heads, {number} decodes"
            cases.append(AttentionCase(name, num_heads, num_kv_heads, 128, spans))
    return cases


def check_attention(session: Session, case: AttentionCase) -> None:
    device = session.device
    seq_lens = [past + new for past, new in case.spans]
    starts = [0]
    for _, new in case.spans:
        starts.append(starts[-1] + new)
    tables, keys, values = _fill_caches(session, case, seq_lens)
    num_rows = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.randn(starts[-1], num_rows, case.head_dim, dtype=case.dtype, device=device)
    query = qkv[:, : case.num_heads]
    plan = plan_for_kernels(
        tables,
        starts,
        seq_lens,
        block_size=case.block_size,
        tiling=Tiling.of(
            case.num_heads, [(case.num_kv_heads, case.head_dim)], case.dtype, [case.window]
        ),
        device=device,
    )
    session.poison()
    scale = case.head_dim**-0.5
    actual = paged_attention(query, keys, values, plan, scale, case.window, case.softcap)
    expected = torch.empty(query.shape, dtype=torch.float64, device=device)
    for i, (table, length) in enumerate(zip(tables, seq_lens, strict=True)):
        index = torch.tensor(table, device=device)
        rows = slice(starts[i], starts[i + 1])
        key, value = (cache[index].flatten(0, 1)[:length].double() for cache in (keys, values))
        expected[rows] = attend_by_definition(query[rows].double(), key, value, case)
    session.check_close(f"attention {case.name}", actual, expected, LIMITS[case.dtype])


def _fill_caches(
    session: Session, case: AttentionCase, seq_lens: list[int]
) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return block tables, keys and values; slots that belong to no sequence hold NaN."""
    num_blocks = [-(-length // case.block_size) for length in seq_lens]
    order = torch.randperm(sum(num_blocks) + 7).tolist()
    shape = (len(order), case.block_size, case.num_kv_heads, case.head_dim)
    keys, values = (
        torch.full(shape, float("nan"), dtype=case.dtype, device=session.device) for _ in range(2)
    )
    tables = []
    for number, length in zip(num_blocks, seq_lens, strict=True):
        tables.append([order.pop() for _ in range(number)])
        for cache in (keys, values):
            rows = torch.randn(length, *shape[2:], dtype=case.dtype, device=session.device)
            for block, part in zip(tables[-1], rows.split(case.block_size), strict=True):
                cache[block, : len(part)] = part
    return tables, keys, values


def attend_by_definition(query: Tensor, key: Tensor, value: Tensor, case: AttentionCase) -> Tensor:
    """Return the attention of the last queries of one sequence, in float64."""
    group = case.num_heads // case.num_kv_heads
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * case.head_dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    num_keys = len(key)
    position = torch.arange(num_keys - len(query), num_keys, device=query.device)[:, None]
    of_key = torch.arange(num_keys, device=query.device)[None]
    is_hidden = of_key > position
    if case.window:
        is_hidden |= of_key <= position - case.window
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


# -- norm, activation and rotation ----------------------------------------------------------------


def check_rows(session: Session, size: int, num_rows: int) -> None:
    def random(width: int) -> Tensor:
        return torch.randn(num_rows, width, device=session.device).to(torch.bfloat16)

    x, residual = random(size), random(size)
    weight = torch.rand(size, device=session.device).to(torch.bfloat16)
    session.poison()
    normed, total = add_rms_norm(x, residual, weight, EPS)
    exact = x.double() + residual.double()
    expected = exact * (exact.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    session.check_close(f"add_rms_norm {num_rows} x {size}: sum", total, exact)
    session.check_close(f"add_rms_norm {num_rows} x {size}: norm", normed, expected)
    gate_up = random(2 * size)
    session.poison()
    expected = F.silu(gate_up[:, :size].double()) * gate_up[:, size:].double()
    session.check_close(f"silu_mul {num_rows} x {size}", silu_mul(gate_up), expected)


def check_rotary(
    session: Session, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool
) -> None:
    num_tokens, block_size = (3, 4) if session.dry else (515, 16)
    device, dtype, half = session.device, session.dtype, head_dim // 2
    num_rows = num_heads + 2 * num_kv_heads
    qkv = torch.randn(num_tokens, num_rows, head_dim, device=device).to(dtype)
    exact = qkv.double()
    angle = torch.rand(NUM_POSITIONS, half, device=device) * 6
    axes = torch.randint(0, 3, (half,), device=device).int()
    table = Rotary(angle.cos().to(dtype), angle.sin().to(dtype), axes)
    positions = torch.randint(0, NUM_POSITIONS, (3, num_tokens), device=device)
    shape = (num_tokens // block_size + 2, block_size, num_kv_heads, head_dim)
    caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(shape[0] * block_size, device=device)[:num_tokens].int()
    slots[1] = -1
    norm = HeadNorm(torch.rand(2, head_dim, device=device).to(dtype), EPS) if has_norm else None
    queries = rotate_and_write(qkv, positions, table, caches[0], caches[1], slots, norm)

    expected = _rotate_by_definition(exact, positions, table, norm, num_heads, num_kv_heads)
    name = f"rotary {num_heads}/{num_kv_heads}/{head_dim}{', head norm' if has_norm else ''}"
    session.check_close(f"{name}: queries", queries, expected[:, :num_heads])
    is_written = slots >= 0
    at = slots[is_written].long()
    keys, values = (cache.view(-1, num_kv_heads, head_dim) for cache in caches)
    session.check_close(f"{name}: keys", keys[at], expected[is_written, num_heads:])
    written = exact[is_written, num_heads + num_kv_heads :]
    session.check_close(f"{name}: values", values[at], written, 1e-9)
    is_other = torch.ones(len(keys), dtype=torch.bool, device=device)
    is_other[at] = False
    is_clean = not bool(keys[is_other].any() or values[is_other].any())
    session.add(f"{name}: other slots are unchanged", is_clean)


def _rotate_by_definition(
    qkv: Tensor,
    positions: Tensor,
    table: Rotary,
    norm: HeadNorm | None,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """Return the rotated queries and keys, [num_tokens, num_heads + num_kv_heads, head_dim]."""
    vectors = qkv[:, : num_heads + num_kv_heads]
    if norm is not None:
        vectors = vectors * (vectors.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
        weights = norm.weight.double().repeat_interleave(
            torch.tensor([num_heads, num_kv_heads], device=qkv.device), 0
        )
        vectors = vectors * weights
    at = positions[table.axes.long()].T  # [num_tokens, head_dim // 2]
    cos, sin = (angles.double().gather(0, at)[:, None] for angles in (table.cos, table.sin))
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
