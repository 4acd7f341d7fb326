"""Runs a transformers model on a flat batch: the tokens of all sequences in one row, no padding.

The model sees tensors only; the runner maps them to requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.models.language import AttendItems, LanguageAdapter
from shared.models.states import recurrent_layers
from workers.engine.model.attention import ATTENTION, KVCache
from workers.engine.model.states import NO_STATES, StatePool, StateStep
from workers.engine.model.step_plan import plan_step
from workers.engine.model.support import kv_shapes, layer_windows
from workers.engine.sampling.verifier import Draw, draw_batch
from workers.engine.transfers import upload


class BatchLayout(NamedTuple):
    """Placement of a batch's tokens; for the fields see `plan_step`."""

    block_tables: Sequence[Sequence[int]]
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    spans: Sequence[Sequence[tuple[int, int]]] = ()


class StepInputs(NamedTuple):
    """Tensors of one step."""

    embeddings: Tensor  # [num_tokens, hidden_size]
    positions: Tensor  # [num_position_rows, num_tokens]
    plan: Any
    kv_cache: KVCache
    sampled_rows: Tensor  # [num_sampled]
    deepstack: Tensor | None = None  # [num_levels, num_tokens, hidden_size]
    """`deepstack[i]` is added to the hidden states after layer i: image features in their rows
    and zeros elsewhere, or None if the batch has no such rows."""
    hidden_rows: Tensor | None = None  # [num_hidden]
    """Rows whose final hidden states are needed; no logits are computed for them."""
    hidden: Tensor | None = None  # [num_hidden, hidden_size] float32
    """Output buffer for these states; None if `hidden_rows` is None."""
    token_ids: Tensor | None = None  # [num_tokens]
    """Tokens of the batch, for layers that use their ids besides the embeddings."""
    states: StateStep = NO_STATES
    """States of recurrent layers."""
    attend_items: AttendItems | None = None
    """Cross attention to the items of requests; None for a model without cross attention."""


class DecoderModel(ABC):
    """A decoder, as the runner sees it. Plans and caches are opaque to the runner."""

    kv_packing = "torch"
    """Name of the kernels that write the cache. Others use another layout or round differently."""

    def __init__(self, family: LanguageAdapter) -> None:
        self.family = family
        self.draw: Draw = draw_batch
        """Draws the next tokens from logits of the model."""
        self.num_graph_steps = self.num_eager_steps = 0
        """Steps on a GPU that were replayed as CUDA graphs, and other steps on it."""
        self.num_graph_rows = self.num_padding_rows = 0
        """Rows of the replayed graphs with a sequence, and rows without one."""
        self._embed_tokens: Any = family.input_embeddings
        # Stored, because transformers iterates over all parameters to look them up.
        self.dtype: torch.dtype = family.model.dtype
        self.device: torch.device = family.model.device
        self.vocab_size = int(family.decoder.config.vocab_size)
        self.keeps_states = bool(recurrent_layers(family.decoder.config))
        """Whether the model has recurrent layers, with a state for each sequence."""

    def new_states(self, num_slots: int) -> StatePool:
        """Return a pool for the states of `num_slots` sequences."""
        return StatePool(self.family.decoder, num_slots)

    @abstractmethod
    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return two tensors per layer, whose first dimension is the block."""

    def copy_blocks(self, kv_cache: KVCache, copies: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks, given as (source, destination). All reads come before the writes."""
        source, destination = upload(copies, self.device).T
        for caches in kv_cache:
            for cache in caches:
                cache.index_copy_(0, destination, cache.index_select(0, source))

    def zero_blocks(self, kv_cache: KVCache, blocks: Sequence[int]) -> None:
        index = upload(blocks, self.device)
        for keys, values in kv_cache:
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)

    def capture(self, kv_cache: KVCache) -> None:
        """Prepare replayable steps over this cache, such as CUDA graphs, before the first step."""
        return

    @abstractmethod
    def plan(self, batch: BatchLayout, kv_cache: KVCache) -> Any:
        """Return the plan of a step for all layers."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input embeddings: [num_tokens] -> [num_tokens, hidden_size]."""
        embeddings: Tensor = self._embed_tokens(token_ids)
        return embeddings

    @abstractmethod
    def forward(self, step: StepInputs) -> Tensor:
        """Return the logits of the sampled rows, [num_sampled, vocab_size]."""


class FlatModel(DecoderModel):
    """A decoder that runs transformers' modules with the paged attention of `attention`."""

    def __init__(self, family: LanguageAdapter) -> None:
        super().__init__(family)
        family.decoder.set_attn_implementation(ATTENTION)
        self._windows = set(layer_windows(family.decoder_config))

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        # The memory is zeroed: a masked NaN would still spoil the sum over the values.
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        shapes = [
            (num_blocks, block_size, *shape) for shape in kv_shapes(self.family.decoder_config)
        ]
        return [(zeros(shape), zeros(shape)) for shape in shapes]

    def plan(self, batch: BatchLayout, kv_cache: KVCache) -> Any:
        return plan_step(
            *batch,
            opens_full_layers=self.family.opens_full_layers,
            exceeds_windows=self.family.exceeds_windows,
            block_size=kv_cache[0][0].shape[1],
            dtype=self.dtype,
            device=self.device,
            windows=self._windows,
        )

    def forward(self, step: StepInputs) -> Tensor:
        attention: dict[str, Any] = {"plan": step.plan, "kv_cache": step.kv_cache}
        attention |= self.family.layer_inputs(step.token_ids)
        if step.attend_items is not None:
            attention["attend_items"] = step.attend_items
        with _copied_hidden(self.family.decoder, step), step.states.applied():
            logits = self.family.forward(
                step.embeddings[None],
                step.positions,
                step.sampled_rows,
                step.deepstack,
                **attention,
            )
        return logits[0]


@contextmanager
def _copied_hidden(decoder: torch.nn.Module, step: StepInputs) -> Iterator[None]:
    """Copy the decoder's output into `step.hidden`: the model's own forward returns logits only."""
    hidden = step.hidden
    if hidden is None:
        yield
        return

    def copy(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden.copy_(output.last_hidden_state[0, step.hidden_rows])

    handle = decoder.register_forward_hook(copy)
    try:
        yield
    finally:
        handle.remove()
