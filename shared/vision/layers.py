"""Faster layers for towers, with the weights and the results of transformers' layers.

transformers embeds patches by a convolution with kernels of the size of a patch, attends to one
image or window after the other, and rotates queries and keys in eight passes over memory. Here a
patch is embedded by one matrix product, attention takes one call for all segments of equal length,
and the rotation takes five passes. If the C++ kernels are available and faster on this machine,
they rotate and attend in one call, and compute linears together with their activations, also in
LLaVA. This module depends on the modules of a tower, and not on images or batches.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPAttention

from shared.native import tower_kernels
from shared.native.choices import NEVER, KernelSetting
from shared.native.tower_kernels import TowerKernels
from shared.native.trials import tower_attention
from shared.vision.packed_linears import ChosenKernels, pack_linears

# Limit on the scores that are computed at once. 2**20 to 2**22 took the same time on two cores, and
# 2**23 took 1.2 times as long. Threads wait for each other after each piece, and longer on a busy
# machine.
MAX_SCORES = 2**22


def optimize_qwen_vision(visual: Any, setting: KernelSetting = "measured") -> None:
    """Replace the layers of a tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, and keep the weights."""
    weight = visual.patch_embed.proj.weight
    visual.patch_embed = PatchEmbedding(visual.patch_embed.proj)
    for block in visual.blocks:
        block.attn = SegmentAttention(block.attn)
    _use_kernels(weight, [visual], [block.attn for block in visual.blocks], setting)


def optimize_clip(
    tower: nn.Module, projector: nn.Module, setting: KernelSetting = "measured"
) -> None:
    """Replace the layers of LLaVA's tower and projector. Does nothing without kernels."""
    weight = next(projector.parameters())
    if _find_kernels(weight, setting) is None:
        return
    attentions = []
    for module in tower.modules():
        if isinstance(getattr(module, "self_attn", None), CLIPAttention):
            module.self_attn = ClipAttention(module.self_attn)
            attentions.append(module.self_attn)
    _use_kernels(weight, [tower, projector], attentions, setting)


def _use_kernels(
    weight: Tensor,
    modules: Sequence[nn.Module],
    attentions: "Sequence[SegmentAttention | ClipAttention]",
    setting: KernelSetting,
) -> None:
    """Run modules and their attentions on the kernels, where the kernels were chosen."""
    kernels = _find_kernels(weight, setting)
    if kernels is None:
        return
    trial_of = {
        (a.num_heads, a.head_dim): tower_attention(
            kernels, a.num_heads, a.head_dim, attend_segments
        )
        for a in attentions
    }
    chosen = ChosenKernels(kernels, setting, modules, list(trial_of.values()))
    for attention in attentions:
        trial = trial_of[attention.num_heads, attention.head_dim]
        option = chosen.option_of(trial)
        if option.implementation != "torch":
            attention.kernels, attention.min_tile_rows = kernels, option.min_tile_rows
    for module in modules:
        pack_linears(module, chosen)


def _find_kernels(weight: Tensor, setting: KernelSetting) -> TowerKernels | None:
    return None if setting == "torch" else tower_kernels.find_kernels(weight)


class PatchEmbedding(nn.Module):
    def __init__(self, convolution: Any) -> None:
        """Reuse the weights of an nn.Conv3d."""
        super().__init__()
        weight: Tensor = convolution.weight
        assert convolution.kernel_size == convolution.stride, "patches would overlap"
        # `proj` is the name of the weights in the folder.
        self.proj = nn.Linear(weight[0].numel(), len(weight), bias=False, device="meta")
        self.proj.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=False)
        self.proj.bias = convolution.bias

    def forward(self, patches: Tensor) -> Tensor:
        """Embed [num_patches, channels * frames * pixels] into [num_patches, hidden_size]."""
        embeddings: Tensor = self.proj(patches.to(self.proj.weight.dtype))
        return embeddings


class SegmentAttention(nn.Module):
    """Attention between the patches of a segment, which is an image or a window of it."""

    def __init__(self, attention: Any) -> None:
        """Reuse the weights of transformers' module. Runs on torch until `kernels` is set."""
        super().__init__()
        self.kernels: TowerKernels | None = None
        self.min_tile_rows = NEVER
        self.qkv: nn.Linear = attention.qkv
        self.proj: nn.Linear = attention.proj
        self.num_heads: int = attention.num_heads
        self.head_dim: int = self.proj.in_features // self.num_heads
        self._scale: float = attention.scaling

    def forward(
        self,
        hidden_states: Tensor,  # [num_patches, hidden_size]
        cu_seqlens: Tensor,  # [num_segments + 1], on the CPU
        position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [num_patches, head_dim]
        **kwargs: Any,
    ) -> Tensor:  # [num_patches, hidden_size]
        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
        query, key, value = qkv.unbind(1)
        if self.kernels is not None:
            angles = position_embeddings
            output = self.kernels.attend(
                query, key, value, angles, cu_seqlens, self._scale, self.min_tile_rows
            )
        else:
            query, key = rotate(qkv[:, :2], *position_embeddings).unbind(1)
            lengths = cu_seqlens.diff().tolist()
            output = attend_segments(query, key, value, lengths, self._scale)
        projected: Tensor = self.proj(output.flatten(1))
        return projected


class ClipAttention(nn.Module):
    """Attention between all patches of a square."""

    def __init__(self, attention: Any) -> None:
        """Reuse the weights of a CLIPAttention. Runs on torch until `kernels` is set."""
        super().__init__()
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = nn.Linear(parts[0].in_features, 3 * parts[0].out_features, device="meta")
        qkv.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        qkv.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
        self.qkv = qkv
        self.out_proj: nn.Linear = attention.out_proj
        self.kernels: TowerKernels | None = None
        self.min_tile_rows = NEVER
        self.num_heads: int = attention.num_heads
        self.head_dim: int = self.out_proj.in_features // self.num_heads
        self._scale: float = attention.scale

    def forward(
        self,
        hidden_states: Tensor,  # [num_squares, num_patches, hidden_size]
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # [num_squares, num_patches, hidden_size], and no weights
        num_squares, num_patches, _ = hidden_states.shape
        qkv = self.qkv(hidden_states).view(num_squares * num_patches, 3, self.num_heads, -1)
        query, key, value = qkv.unbind(1)
        if self.kernels is not None:
            cu_seqlens = torch.arange(num_squares + 1) * num_patches
            output = self.kernels.attend(
                query, key, value, None, cu_seqlens, self._scale, self.min_tile_rows
            )
        else:
            lengths = [num_patches] * num_squares
            output = attend_segments(query, key, value, lengths, self._scale)
        return self.out_proj(output.view(hidden_states.shape)), None


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [num_patches, ..., head_dim], in float32 as transformers does.

    `cos` and `sin` are [num_patches, head_dim] of two equal halves.
    """
    half = vectors.shape[-1] // 2
    shape = (len(vectors), *[1] * (vectors.dim() - 2), half)
    cos, sin = cos[:, :half].float().view(shape), sin[:, :half].float().view(shape)
    exact = vectors.float()
    left, right = exact[..., :half], exact[..., half:]
    rotated = torch.empty_like(exact)
    torch.mul(left, cos, out=rotated[..., :half]).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=rotated[..., half:]).addcmul_(left, sin)
    return rotated.to(vectors.dtype)


def attend_segments(
    query: Tensor,  # [num_patches, num_heads, head_dim]
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float,
) -> Tensor:  # [num_patches, num_heads, head_dim]
    """Attend within consecutive segments; `lengths` adds up to num_patches.

    Segments of one length share a call.
    """
    groups = _group(tuple(lengths), query.device)
    if len(groups) == 1:
        return _attend(query, key, value, lengths[0], scale)
    output = torch.empty_like(query)
    for length, rows in groups:
        q, k, v = (tensor.index_select(0, rows) for tensor in (query, key, value))
        output.index_copy_(0, rows, _attend(q, k, v, length, scale))
    return output


def _attend(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    """Attend within segments that all have this length."""
    shape = (-1, length, *query.shape[1:])
    q, k, v = (tensor.view(shape).transpose(1, 2) for tensor in (query, key, value))
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        output = _attend_in_pieces(q, k, v, scale)
    else:
        output = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return output.transpose(1, 2).flatten(0, 1)


def _attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend in pieces of MAX_SCORES; arguments are [num_segments, num_heads, length, head_dim].

    Scores are rounded to bfloat16, as in transformers' eager attention. SDPA computes exact scores
    and took 1.6 times as long.
    """
    length = query.shape[2]
    num_rows = min(length, max(1, MAX_SCORES // length))
    num_pairs = max(1, MAX_SCORES // (length * num_rows))
    queries, keys, values = ((query * scale).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
    output = torch.empty_like(queries)
    for i in range(0, len(queries), num_pairs):
        pairs = slice(i, i + num_pairs)
        transposed = keys[pairs].transpose(1, 2)
        for j in range(0, length, num_rows):
            rows = slice(j, j + num_rows)
            scores = torch.bmm(queries[pairs, rows], transposed)
            torch.bmm(scores.softmax(-1), values[pairs], out=output[pairs, rows])
    return output.view(query.shape)


# All layers of a tower have the same lengths, or one of two. Images of one size repeat them.
@lru_cache(maxsize=64)
def _group(lengths: tuple[int, ...], device: torch.device) -> list[tuple[int, Tensor]]:
    """Return each length with the rows of its segments, [num_rows], on the device."""
    rows: dict[int, list[Tensor]] = {}
    start = 0
    for length in lengths:
        rows.setdefault(length, []).append(torch.arange(start, start + length))
        start += length
    return [(length, torch.cat(parts).to(device)) for length, parts in rows.items()]
