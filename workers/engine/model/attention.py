"""Paged attention in torch, for a flat batch of prefill chunks and decodes (vLLM's PagedAttention).

This module defines the layout of the KV cache; `step_plan` determines which parts a step reads.
transformers calls `attention_of_layer` for every layer through its attention interface. The plan
and the cache reach it as keyword arguments of the model's forward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from workers.engine.model.step_plan import DecodeGroup, PrefillChunk, StepPlan, Window

ATTENTION = "pagemill_paged"

KVCache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer: [num_blocks, block_size, num_kv_heads, head_dim]."""

# Arguments of attention without effect here: the plan has the positions, and no layer drops weights
# or returns them. Any other argument belongs to a feature that this implementation lacks.
HARMLESS = frozenset(
    {
        "dropout",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)


def write_cache(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write `rows` [num_tokens, num_kv_heads, head_dim] to their slots of one layer's cache."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    plan: StepPlan,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Return the attention of each query over its sequence's cached keys.

    `window` must be one of the plan's windows. `softcap` bounds the scores by tanh, as in Gemma 2.
    `sinks` [num_heads] are scores of a key without a value in each softmax, as in gpt-oss.
    """
    reads = plan.reads[window]
    if sinks is not None:
        sinks = sinks.view(key_cache.shape[2], -1, 1)
    cache = _LayerCache(key_cache, value_cache, scale, softcap, sinks)
    if len(reads.decodes) == 1 and reads.decodes[0].rows is None:
        return cache.attend_decodes(query, reads.decodes[0])
    output = torch.empty_like(query)
    for chunk in reads.chunks:
        rows = query[chunk.start : chunk.stop]
        output[chunk.start : chunk.stop] = cache.attend_chunk(rows, chunk)
    for decodes in reads.decodes:
        assert decodes.rows is not None
        rows = query.index_select(0, decodes.rows)
        output.index_copy_(0, decodes.rows, cache.attend_decodes(rows, decodes))
    return output


@dataclass(frozen=True, slots=True)
class _LayerCache:
    """Keys and values of one layer, with the parameters of its attention."""

    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None  # [num_kv_heads, group, 1]

    def attend_decodes(self, query: Tensor, decodes: DecodeGroup) -> Tensor:
        """Return the attention of decodes, [num_decodes, num_heads, head_dim].

        The query heads of a KV head take the place of SDPA's sequence dimension, so that they share
        the keys (grouped-query attention without copies).
        """
        num_kv_heads, head_dim = self.keys.shape[2:]
        shape = (decodes.num_decodes, -1, num_kv_heads, head_dim)
        key = _read_blocks(self.keys, decodes.blocks).view(shape)[:, : decodes.max_len]
        value = _read_blocks(self.values, decodes.blocks).view(shape)[:, : decodes.max_len]
        output = self._attend(
            query.reshape(decodes.num_decodes, num_kv_heads, -1, head_dim),
            key.transpose(1, 2),
            value.transpose(1, 2),
            decodes.mask,
            self.sinks,
            is_causal=False,
        )
        return output.reshape(query.shape)

    def attend_chunk(self, query: Tensor, chunk: PrefillChunk) -> Tensor:
        """Return the attention of a chunk, [num_queries, num_heads, head_dim].

        KV heads take the place of SDPA's batch dimension, so that their query heads share them
        without copies.
        """
        num_kv_heads, head_dim = self.keys.shape[2:]
        num_queries, num_heads = query.shape[:2]
        group = num_heads // num_kv_heads

        def gather(cache: Tensor) -> Tensor:  # [num_kv_heads, group, num_keys, head_dim]
            rows = _read_blocks(cache, chunk.blocks).flatten(0, 1)[: chunk.num_keys]
            return rows.transpose(0, 1)[:, None].expand(-1, group, -1, -1)

        output = self._attend(
            query.transpose(0, 1).reshape(num_kv_heads, group, num_queries, head_dim),
            gather(self.keys),
            gather(self.values),
            chunk.mask,
            None if self.sinks is None else self.sinks[..., None],
            is_causal=chunk.mask is None,
        )
        return output.flatten(0, 1).transpose(0, 1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        *,
        is_causal: bool,
    ) -> Tensor:
        if self.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=is_causal, scale=self.scale
            )
        scores = (query @ key.transpose(-2, -1)) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return weights[..., : key.shape[-2]] @ value


def _read_blocks(cache: Tensor, blocks: Tensor | slice) -> Tensor:
    if isinstance(blocks, slice):
        return cache[blocks]
    # index_select is five times as fast here as advanced indexing.
    return cache.index_select(0, blocks)


def pad_values(value: Tensor, key: Tensor) -> Tensor:
    """Return values with the width of keys: both caches of a layer have one shape."""
    padding = key.shape[-1] - value.shape[-1]
    return F.pad(value, (0, padding)) if padding else value


def check_arguments(
    module: torch.nn.Module, attention_mask: Tensor | None, others: Mapping[str, object]
) -> None:
    """Raise NotImplementedError for a feature of attention that the engine does not have.

    transformers creates no mask for this engine, so a mask comes from the layer itself.
    """
    named = {"attention_mask": attention_mask, **others}
    for name in sorted(named.keys() - HARMLESS):
        if named[name] is not None:
            raise NotImplementedError(f"{name} of {type(module).__name__} is not supported")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} is not causal, which is not supported")


def attention_of_layer(
    module: torch.nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    plan: StepPlan,
    kv_cache: KVCache,
    sliding_window: Window = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_heads, head_dim]
    """Attention function for transformers; raises NotImplementedError for unsupported features."""
    check_arguments(module, attention_mask, kwargs)
    key_cache, value_cache = kv_cache[int(module.layer_idx)]  # type: ignore[arg-type]
    value_dim = value.shape[-1]
    write_cache(key_cache, plan.slot_mapping, key[0].transpose(0, 1))
    write_cache(value_cache, plan.slot_mapping, pad_values(value, key)[0].transpose(0, 1))
    output = paged_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        plan,
        scaling,
        sliding_window,
        softcap,
        s_aux,
    )
    return output[None, ..., :value_dim], None


# No mask function is registered with it. transformers then creates no mask, and does not search the
# positions for packed sequences either.
AttentionInterface.register(ATTENTION, attention_of_layer)
