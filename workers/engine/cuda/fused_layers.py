"""transformers' decoder layers with kernels for their many small operations.

A layer keeps its modules, with their names and weights; forward passes are replaced: projections of
one input are one product, heads are turned and written into the cache at once, the residual is
added where it is normalised, and the gate is applied where it is computed. Only layers that are
known to compute what Llama's do are touched. Any other model is served by the kernels through
transformers' attention interface alone.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import SiLUActivation

from shared.models.registry import find_decoder_traits
from workers.engine.cuda.kernels.activation import silu_mul
from workers.engine.cuda.kernels.attention import paged_attention
from workers.engine.cuda.kernels.norm import add_rms_norm, rms_norm
from workers.engine.cuda.kernels.plan import KernelPlan
from workers.engine.cuda.kernels.rotary import HeadNorm, rotary_of, rotate_and_write, write_cache
from workers.engine.model.support import layer_windows

ATTENTION = "pagemill_kernels"


def fuse(decoder: PreTrainedModel, num_position_rows: int) -> bool:
    """Replace the layers of a decoder whose family is `llama_like`.

    Returns False, with nothing changed, for any other decoder.
    """
    model: Any = decoder
    if "llama_like" not in find_decoder_traits(model.config):
        return False
    if not all(_is_silu(layer.mlp) for layer in model.layers):
        return False
    like = model.norm.weight
    max_positions = model.config.max_position_embeddings
    rotary = rotary_of(model.rotary_emb, max_positions, num_position_rows, like)
    model.rotary_emb = _Positions()
    model.norm.forward = MethodType(_normalise, model.norm)
    for layer, window in zip(model.layers, layer_windows(model.config), strict=True):
        layer.forward = MethodType(_run_layer, layer)
        layer.input_layernorm.forward = MethodType(_normalise, layer.input_layernorm)
        attention, mlp = layer.self_attn, layer.mlp
        attention.qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        attention.rotary, attention.head_norm = rotary, _head_norm(attention)
        attention.window = window
        attention.forward = MethodType(_run_attention, attention)
        mlp.gate_up = _join(mlp.gate_proj, mlp.up_proj)
        mlp.forward = MethodType(_run_mlp, mlp)
    return True


class _Positions(nn.Module):
    """In place of the rotary embedding: the kernel looks up the angles itself."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # [num_position_rows, num_tokens]
        return position_ids.reshape(-1, x.shape[1])


def _normalise(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, self.weight, self.variance_epsilon)


def _run_layer(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    norm = self.post_attention_layernorm
    normed, residual = add_rms_norm(attended, hidden_states, norm.weight, norm.variance_epsilon)
    output: Tensor = residual + self.mlp(normed)
    return output


def _run_attention(
    self: Any,
    hidden_states: Tensor,  # [1, num_tokens, hidden_size]
    position_embeddings: Tensor,  # [num_position_rows, num_tokens]: the positions themselves
    plan: KernelPlan,
    kv_cache: list[tuple[Tensor, Tensor]],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    qkv = F.linear(hidden_states[0], *self.qkv)
    key_cache, value_cache = kv_cache[self.layer_idx]
    query = rotate_and_write(
        qkv.view(len(qkv), -1, self.head_dim),
        position_embeddings,
        self.rotary,
        key_cache,
        value_cache,
        plan.slots,
        self.head_norm,
    )
    attended = paged_attention(query, key_cache, value_cache, plan, self.scaling, self.window)
    return self.o_proj(attended.flatten(1))[None], None


def _run_mlp(self: Any, x: Tensor) -> Tensor:  # [1, num_tokens, hidden_size]
    output: Tensor = self.down_proj(silu_mul(F.linear(x[0], *self.gate_up)))
    return output[None]


def attention_of_layer(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    plan: KernelPlan,
    kv_cache: list[tuple[Tensor, Tensor]],
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_heads, head_dim]
    """For the layers of a model that is not fused."""
    key_cache, value_cache = kv_cache[int(module.layer_idx)]  # type: ignore[arg-type]
    query, key, value = (rows[0].transpose(0, 1).contiguous() for rows in (query, key, value))
    write_cache(key, value, key_cache, value_cache, plan.slots)
    output = paged_attention(query, key_cache, value_cache, plan, scaling, sliding_window, softcap)
    return output[None], None


# Without a mask function, as in `attention`.
AttentionInterface.register(ATTENTION, attention_of_layer)


def _is_silu(mlp: Any) -> bool:
    return hasattr(mlp, "gate_proj") and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


def _join(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Their weights and biases one below the other; the modules' own become views of them."""

    def join(name: str) -> Tensor:
        parts = [getattr(projection, name) for projection in projections]
        joined = torch.cat([part.data for part in parts])
        views = torch.split(joined, [len(part) for part in parts])
        for part, view in zip(parts, views, strict=True):
            part.data = view
        return joined

    return join("weight"), None if projections[0].bias is None else join("bias")


def _head_norm(attention: Any) -> HeadNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    norms = (attention.q_norm, attention.k_norm)
    weight = torch.stack([norm.weight.data for norm in norms])
    return HeadNorm(weight, attention.q_norm.variance_epsilon)
