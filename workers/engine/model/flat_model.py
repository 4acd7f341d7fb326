"""A transformers model on a flat batch: the tokens of all sequences in one row, without padding.

It knows tensors only. Which tokens these are, and of whom, is the runner's business.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from shared.models.language import LanguageAdapter
from workers.engine.model.attention import ATTENTION, KVCache, new_cache
from workers.engine.model.step_plan import StepPlan, plan_step
from workers.engine.model.support import layer_windows


class DecoderModel(Protocol):
    """What a runner needs; plans and caches are the model's own."""

    family: LanguageAdapter
    dtype: torch.dtype
    device: torch.device
    vocab_size: int

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Of each layer two tensors, whose first dimension is that of the blocks."""

    def capture(self, kv_cache: KVCache) -> None:
        """Before the first step: make ready what steps over this cache replay."""

    def plan(
        self,
        block_tables: Sequence[Sequence[int]],
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        kv_cache: KVCache,
    ) -> Any:
        """Of a step, once for all layers; see `plan_step`."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        plan: Any,
        kv_cache: KVCache,
        sampled_rows: Tensor,
        deepstack: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size] and positions [num_position_rows, num_tokens] to logits of the
        sampled rows, [num_sampled, vocab_size]. What `deepstack` [num_levels, num_tokens,
        hidden_size] holds is added behind the first layers."""


class FlatModel:
    def __init__(self, family: LanguageAdapter) -> None:
        self.family = family
        self._embed_tokens: Any = family.model.get_input_embeddings()
        family.decoder.set_attn_implementation(ATTENTION)
        # transformers walks the parameters at each look; a step looks several times.
        self.dtype: torch.dtype = family.model.dtype
        self.device: torch.device = family.model.device
        self.vocab_size = int(family.decoder.config.vocab_size)
        self._windows = set(layer_windows(family.decoder.config))

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        num_layers, num_kv_heads, head_dim = kv_shape(self.family.decoder.config)
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return new_cache(num_layers, shape, self.dtype, self.device)

    def capture(self, kv_cache: KVCache) -> None:
        pass

    def plan(
        self,
        block_tables: Sequence[Sequence[int]],
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        kv_cache: KVCache,
    ) -> StepPlan:
        return plan_step(
            block_tables,
            query_start_loc,
            seq_lens,
            block_size=kv_cache[0][0].shape[1],
            dtype=self.dtype,
            device=self.device,
            windows=self._windows,
        )

    def embed(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden_size]
        embeddings: Tensor = self._embed_tokens(token_ids)
        return embeddings

    def forward(
        self,
        embeddings: Tensor,  # [num_tokens, hidden_size]
        positions: Tensor,  # [num_position_rows, num_tokens]
        plan: StepPlan,
        kv_cache: KVCache,
        sampled_rows: Tensor,  # [num_sampled]
        deepstack: Tensor | None = None,  # [num_levels, num_tokens, hidden_size]
    ) -> Tensor:  # logits, [num_sampled, vocab_size]
        """`deepstack[i]` is added to the hidden states behind layer i: features of pictures in
        their rows, zeros elsewhere; None for a batch that has no such rows."""
        logits = self.family.forward(
            embeddings[None], positions, sampled_rows, deepstack, plan=plan, kv_cache=kv_cache
        )
        return logits[0]


def kv_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Layers, KV heads and the size of a head."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim
