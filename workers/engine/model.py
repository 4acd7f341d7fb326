"""A transformers model on a flat batch: the tokens of all sequences in one row, without padding.

It knows tensors only. Which tokens these are, and of whom, is the runner's business.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from workers.engine.attention import ATTENTION, KVCache, StepPlan, new_cache, plan_step
from workers.engine.families import Family


class FlatModel:
    def __init__(self, family: Family) -> None:
        self.family = family
        self._model: Any = family.model
        self._embed_tokens: Any = family.model.get_input_embeddings()
        family.decoder.set_attn_implementation(ATTENTION)
        # transformers walks the parameters at each look; a step looks several times.
        self.dtype: torch.dtype = family.model.dtype
        self.device: torch.device = family.model.device
        self.vocab_size = int(family.decoder.config.vocab_size)

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        num_layers, num_kv_heads, head_dim = kv_shape(self.family.decoder.config)
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return new_cache(num_layers, shape, self.dtype, self.device)

    def capture(self, kv_cache: KVCache) -> None:
        """Before the first step: make ready what steps over this cache replay; nothing, here."""

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
    ) -> Tensor:  # logits, [num_sampled, vocab_size]
        """Through the model's own head, for some families scale or bound their logits there."""
        output = self._model(
            inputs_embeds=embeddings[None],
            position_ids=positions if len(positions) == 1 else positions[:, None],
            logits_to_keep=sampled_rows,
            use_cache=False,
            plan=plan,
            kv_cache=kv_cache,
        )
        logits: Tensor = output.logits[0]
        return logits


def kv_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Layers, KV heads and the size of a head."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim
