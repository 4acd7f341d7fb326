"""Faster layers for towers, with the weights and the results of transformers' own layers.

transformers embeds patches by a convolution whose kernel is a patch, attends to one image or window
after the other, and rotates queries and keys in eight passes over memory. Here a patch is embedded
by one matrix product, segments of equal length are attended to in one call, and the rotation takes
five passes. Where the C++ kernels are available, they rotate and attend in one call, and linears
run on them together with their activations, also in LLaVA. This module knows the modules of a
tower, and neither images nor batches.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPAttention

from shared.native import tower_kernels
from shared.native.tower_kernels import TowerKernels

# Scores that are computed at once. 2**20 to 2**22 took the same time on two cores, 2**23 took 1.2
# times as long. Threads wait for each other after each piece, longer so on a busy machine.
MAX_SCORES = 2**22

# Names of a linear and the activation behind it in the modules of towers.
ACTIVATED = (
    *(("fc1", "act"), ("linear_fc1", "act_fn"), ("gate_proj", "act_fn"), ("0", "1")),
    *(("fc1", "activation_fn"), ("linear_1", "act")),
)
# Activations by their names in the kernels.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def optimize_qwen_vision(visual: Any) -> None:
    """Replace the layers of a tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL; the weights stay."""
    kernels = tower_kernels.find_kernels(visual.patch_embed.proj.weight)
    visual.patch_embed = PatchEmbedding(visual.patch_embed.proj)
    for block in visual.blocks:
        block.attn = SegmentAttention(block.attn, kernels)
    if kernels is not None:
        pack_linears(visual, kernels)


def optimize_clip(tower: nn.Module, projector: nn.Module) -> None:
    """Replace the layers of LLaVA's tower and projector; without kernels they stay unchanged."""
    kernels = tower_kernels.find_kernels(next(projector.parameters()))
    if kernels is None:
        return
    for module in tower.modules():
        if isinstance(getattr(module, "self_attn", None), CLIPAttention):
            module.self_attn = ClipAttention(module.self_attn, kernels)
    pack_linears(tower, kernels)
    pack_linears(projector, kernels)


def pack_linears(module: nn.Module, kernels: TowerKernels) -> None:
    """Replace all linears in a module, and the activations behind them, by `PackedLinear`.

    The weights of one linear are released before the next one is packed.
    """
    for linear_name, activation_name in ACTIVATED:
        linear, follower = (getattr(module, name, None) for name in (linear_name, activation_name))
        if isinstance(linear, nn.Linear) and isinstance(follower, nn.Module):
            activation = _find_activation(follower)
            if activation is not None:
                setattr(module, linear_name, PackedLinear(linear, kernels, activation))
                setattr(module, activation_name, nn.Identity())
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child, kernels))
        else:
            pack_linears(child, kernels)


def _find_activation(activation: nn.Module) -> str | None:
    """Return the kernels' name of an activation; None if it has none.

    The values decide, because one function has several classes.
    """
    x = torch.linspace(-6, 6, 101)
    for name, function in _FUNCTIONS.items():
        if torch.allclose(activation(x), function(x), atol=1e-6):
            return name
    return None


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, kernels: TowerKernels, activation: str = "none") -> None:
        """Pack the weights of a linear, which must have an even number of inputs."""
        super().__init__()
        num_outputs = linear.out_features
        bias = torch.zeros(num_outputs) if linear.bias is None else linear.bias.detach().float()
        self._kernels = kernels
        self._activation = activation
        self._num_outputs = num_outputs
        # transformers reads the type and the device of a `weight`.
        self.weight = tower_kernels.pack_weight(linear.weight)
        self._bias = F.pad(bias, (0, -num_outputs % tower_kernels.PANEL))

    def forward(self, x: Tensor) -> Tensor:  # [..., num_inputs] -> [..., num_outputs]
        return self._kernels.multiply(
            x, self.weight, self._bias, self._num_outputs, self._activation
        )


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
    """Attention among the patches of a segment, which is an image or a window of it."""

    def __init__(self, attention: Any, kernels: TowerKernels | None = None) -> None:
        """Reuse the weights of transformers' own module; run on torch without kernels."""
        super().__init__()
        self._kernels = kernels
        self.qkv: nn.Linear = attention.qkv
        self.proj: nn.Linear = attention.proj
        self._num_heads: int = attention.num_heads
        self._scale: float = attention.scaling

    def forward(
        self,
        hidden_states: Tensor,  # [num_patches, hidden_size]
        cu_seqlens: Tensor,  # [num_segments + 1]
        position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [num_patches, head_dim]
        **kwargs: Any,
    ) -> Tensor:  # [num_patches, hidden_size]
        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self._num_heads, -1)
        query, key, value = qkv.unbind(1)
        if self._kernels is not None:
            angles = position_embeddings
            output = self._kernels.attend(query, key, value, angles, cu_seqlens, self._scale)
        else:
            query, key = rotate(qkv[:, :2], *position_embeddings).unbind(1)
            lengths = cu_seqlens.diff().tolist()
            output = attend_segments(query, key, value, lengths, self._scale)
        projected: Tensor = self.proj(output.flatten(1))
        return projected


class ClipAttention(nn.Module):
    """Attention among all patches of a square."""

    def __init__(self, attention: Any, kernels: TowerKernels) -> None:
        """Reuse the weights of a CLIPAttention."""
        super().__init__()
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = nn.Linear(parts[0].in_features, 3 * parts[0].out_features, device="meta")
        qkv.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        qkv.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
        self.qkv = PackedLinear(qkv, kernels)
        self.out_proj: nn.Module = attention.out_proj
        self._kernels = kernels
        self._num_heads: int = attention.num_heads
        self._scale: float = attention.scale

    def forward(
        self,
        hidden_states: Tensor,  # [num_squares, num_patches, hidden_size]
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # [num_squares, num_patches, hidden_size], and no weights
        num_squares, num_patches, _ = hidden_states.shape
        qkv = self.qkv(hidden_states).view(num_squares * num_patches, 3, self._num_heads, -1)
        query, key, value = qkv.unbind(1)
        cu_seqlens = torch.arange(num_squares + 1) * num_patches
        output = self._kernels.attend(query, key, value, None, cu_seqlens, self._scale)
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
    groups = _group(tuple(lengths))
    if len(groups) == 1:
        return _attend(query, key, value, lengths[0], scale)
    output = torch.empty_like(query)
    for length, indexes in groups:
        rows = indexes.to(query.device)
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


# All layers of a tower have the same lengths, or two kinds in turn; so do images of one size.
@lru_cache(maxsize=64)
def _group(lengths: tuple[int, ...]) -> list[tuple[int, Tensor]]:
    """Return each length with the rows of its segments, [num_rows]."""
    rows: dict[int, list[Tensor]] = {}
    start = 0
    for length in lengths:
        rows.setdefault(length, []).append(torch.arange(start, start + length))
        start += length
    return [(length, torch.cat(parts)) for length, parts in rows.items()]
