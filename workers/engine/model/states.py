"""States of recurrent layers: a pool with a slot for each sequence, and its use on a flat batch.

transformers' recurrent layers compute several sequences of one length with the states of a cache.
`StateStep` divides the rows of a flat batch into groups of such sequences, and runs each layer on
one group after the other. Layers with attention are not affected.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.models.states import find_state_shape, recurrent_layers
from workers.engine.transfers import upload

CACHE_NAMES = ("cache_params", "past_key_values")
"""Names of the argument by which transformers' layers take their cache."""


class LayerStates:
    """States of one layer, of all slots of the pool or of the sequences of one call.

    Recurrent layers call its methods, as of a cache of transformers. A sequence that begins has
    zeros, which have the effect of no earlier token.
    """

    def __init__(self, conv: Tensor, recurrent: Tensor | None = None) -> None:
        self.conv = conv  # [num_sequences, num_channels, length]
        self.recurrent = recurrent  # [num_sequences, num_heads, ...]

    def tensors(self) -> list[Tensor]:
        return [self.conv] if self.recurrent is None else [self.conv, self.recurrent]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int) -> Tensor:
        joined = torch.cat([self.conv, inputs], dim=-1)
        self.conv.copy_(joined[..., -conv_kernel_size:])
        return joined

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> None:
        self.recurrent = state


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with the same number of tokens in a step."""

    rows: Tensor  # [num_sequences, num_tokens], in the flat batch
    slots: Tensor  # [num_sequences]


class StatePool:
    """States of all recurrent layers of a decoder; empty for a decoder without such layers."""

    def __init__(self, decoder: PreTrainedModel, num_slots: int) -> None:
        self._device = decoder.device
        self._layers: list[tuple[Any, LayerStates]] = []
        config: Any = decoder.config
        indexes, shape = recurrent_layers(config), find_state_shape(config)
        if not indexes:
            return
        modules: list[Any] = [m for m in decoder.modules() if hasattr(m, "conv_kernel_size")]
        if shape is None or [module.layer_idx for module in modules] != indexes:
            raise NotImplementedError(f"the states of {type(decoder).__name__} are not supported")
        zeros = partial(torch.zeros, device=self._device)
        for module in modules:
            states = LayerStates(zeros((num_slots, *shape.conv), dtype=decoder.dtype))
            if shape.recurrent is not None:
                states.recurrent = zeros((num_slots, *shape.recurrent), dtype=torch.float32)
            self._layers.append((module, states))
            if hasattr(module, "time_step_limit"):
                # transformers limits the time steps of several tokens, but not of a single one, so
                # the answer would depend on the chunks.
                module.time_step_limit = (0.0, math.inf)

    def step(
        self, query_start_loc: Sequence[int], seq_lens: Sequence[int], slots: Sequence[int]
    ) -> "StateStep":
        """Return the states for a step, with sequence i in slot `slots[i]`.

        For the other arguments see `plan_step`. The states of sequences that begin are reset.
        """
        if not self._layers:
            return NO_STATES
        lengths = [stop - start for start, stop in pairwise(query_start_loc)]
        groups = []
        for num_tokens in dict.fromkeys(lengths):
            members = [i for i, length in enumerate(lengths) if length == num_tokens]
            rows = upload([query_start_loc[i] for i in members], self._device)
            rows = rows[:, None] + torch.arange(num_tokens, device=self._device)
            groups.append(_Group(rows, upload([slots[i] for i in members], self._device)))
        pairs = zip(lengths, seq_lens, slots, strict=True)
        if begun := [slot for length, seq_len, slot in pairs if length == seq_len]:
            index = upload(begun, self._device)
            for _, states in self._layers:
                for tensor in states.tensors():
                    tensor.index_fill_(0, index, 0)
        return StateStep(self._layers, groups)


@cache
def _cache_name(forward: Callable[..., Tensor]) -> str:
    names = inspect.signature(forward).parameters
    (name,) = (name for name in CACHE_NAMES if name in names)
    return name


@dataclass(frozen=True, slots=True)
class StateStep:
    """States of the sequences of one step."""

    layers: Sequence[tuple[Any, LayerStates]] = ()
    groups: Sequence[_Group] = ()
    moved: list[tuple[LayerStates, Tensor, LayerStates]] = field(default_factory=list)
    """For each call of a layer: its states in the pool, the slots, and their new content."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the recurrent layers on a flat batch, instead of on one sequence without a past."""
        for layer, states in self.layers:
            layer.forward = partial(self._run_layer, layer, states)
        try:
            yield
        finally:
            for layer, _ in self.layers:
                del layer.forward

    def _run_layer(
        self, layer: Any, states: LayerStates, hidden_states: Tensor, **_: Any
    ) -> Tensor:  # [1, num_tokens, hidden_size], as the hidden states
        run = partial(self._run_group, layer, states)
        if len(self.groups) == 1:
            (group,) = self.groups
            rows = hidden_states.reshape(len(group.slots), -1, hidden_states.shape[-1])
            return run(group.slots, rows).reshape(hidden_states.shape)
        output = torch.empty_like(hidden_states)
        for group in self.groups:
            output[0, group.rows] = run(group.slots, hidden_states[0, group.rows])
        return output

    def _run_group(self, layer: Any, states: LayerStates, slots: Tensor, rows: Tensor) -> Tensor:
        moved = LayerStates(*(t.index_select(0, slots) for t in states.tensors()))
        self.moved.append((states, slots, moved))
        compute = type(layer).forward
        output: Tensor = compute(layer, rows, **{_cache_name(compute): moved})
        return output

    def commit(self) -> None:
        """Store the new states in the pool. A step that fails before can be repeated."""
        for states, slots, moved in self.moved:
            for tensor, new in zip(states.tensors(), moved.tensors(), strict=True):
                tensor.index_copy_(0, slots, new)


NO_STATES = StateStep()
"""States of a step of a model without recurrent layers."""
