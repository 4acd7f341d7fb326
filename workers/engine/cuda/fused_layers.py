"""Fused forward passes for transformers' decoder layers, on Triton kernels.

A layer keeps its modules with their names and weights; only forward passes are replaced. The
projections of one input become one product. Rotary embedding and KV cache write are fused, and so
are residual addition and normalisation, and the gated activation. Layers are replaced only where
they are known to compute the same as Llama's. Other models use the kernels through transformers'
attention interface.
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
from workers.engine.cuda.kernels.rotary import (
    HeadNorm,
    rotate_and_write,
    tabulate_rotary,
    write_cache,
)
from workers.engine.model.attention import attention_of_layer as attend_in_torch
from workers.engine.model.attention import check_arguments, pad_values
from workers.engine.model.step_plan import StepPlan
from workers.engine.model.support import layer_windows

ATTENTION = "pagemill_kernels"


def fuse_layers(decoder: PreTrainedModel, num_position_rows: int) -> bool:
    """Replace the layers of a decoder of a `llama_like` family.

    Returns False, with nothing changed, for any other decoder.
    """
    model: Any = decoder
    if "llama_like" not in find_decoder_traits(model.config):
        return False
    if not all(_is_silu(layer.mlp) for layer in model.layers):
        return False
    like = model.norm.weight
    max_positions = model.config.max_position_embeddings
    rotary = tabulate_rotary(model.rotary_emb, max_positions, num_position_rows, like)
    model.rotary_emb = _PassPositions()
    model.norm.forward = MethodType(_run_norm, model.norm)
    for layer, window in zip(model.layers, layer_windows(model.config), strict=True):
        layer.forward = MethodType(_run_layer, layer)
        layer.input_layernorm.forward = MethodType(_run_norm, layer.input_layernorm)
        attention, mlp = layer.self_attn, layer.mlp
        attention.qkv = _concat_projections(attention.q_proj, attention.k_proj, attention.v_proj)
        attention.rotary, attention.head_norm = rotary, _head_norm(attention)
        attention.window = window
        attention.forward = MethodType(_run_attention, attention)
        mlp.gate_up = _concat_projections(mlp.gate_proj, mlp.up_proj)
        mlp.forward = MethodType(_run_mlp, mlp)
    return True


class _PassPositions(nn.Module):
    """Replaces the rotary embedding and passes positions on: the kernel looks up the angles."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # [num_position_rows, num_tokens]
        return position_ids.reshape(-1, x.shape[1])


def _run_norm(self: Any, x: Tensor) -> Tensor:
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
    position_embeddings: Tensor,  # [num_position_rows, num_tokens], from `_PassPositions`
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
        plan.slot_mapping,
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
    plan: KernelPlan | StepPlan,
    kv_cache: list[tuple[Tensor, Tensor]],
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_heads, head_dim]
    """Attention function for transformers, for models that are not fused.

    A step with spans has the plan of the torch path. Raises NotImplementedError for unsupported
    features.
    """
    if isinstance(plan, StepPlan):
        options = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, **kwargs}
        return attend_in_torch(
            module, query, key, value, attention_mask, scaling, plan, kv_cache, **options
        )
    check_arguments(module, attention_mask, kwargs)
    key_cache, value_cache = kv_cache[int(module.layer_idx)]  # type: ignore[arg-type]
    value_dim, value = value.shape[-1], pad_values(value, key)
    query, key, value = (rows[0].transpose(0, 1).contiguous() for rows in (query, key, value))
    write_cache(key, value, key_cache, value_cache, plan.slot_mapping)
    output = paged_attention(
        query, key_cache, value_cache, plan, scaling, sliding_window, softcap, s_aux
    )
    return output[None, ..., :value_dim], None


# No mask function is registered, as in `workers.engine.model.attention`.
AttentionInterface.register(ATTENTION, attention_of_layer)


def _is_silu(mlp: Any) -> bool:
    return hasattr(mlp, "gate_proj") and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


def _concat_projections(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Concatenate weights and biases along the outputs; the modules keep views of the result."""

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
