"""Cross attention of a flat batch: keys and values of items, in one slot for each request.

An item has the same number of rows in all requests, and its keys and values do not grow. A request
keeps its slot from its first step until another request needs it, or until it ends. The keys and
values can be computed again from the embedding, which the request holds.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shared.models.language import AttendItems, LanguageAdapter
from workers.engine.model.attention import KVCache, paged_attention
from workers.engine.model.step_plan import CacheReads, DecodeGroup, PrefillChunk, StepPlan


class ItemAttention:
    """Cross attention to the items of requests. A request has one item."""

    def __init__(self, family: LanguageAdapter, num_slots: int) -> None:
        """`num_slots` is the largest number of requests in a step."""
        self._family = family
        self._num_slots = num_slots
        self._cache: KVCache = []
        """Keys and values of each layer: [num_slots, num_embeds, num_heads, head_dim]."""
        self._embeddings: dict[str, Tensor] = {}
        self._slots: dict[str, int] = {}
        """Slots by request id, the least recently used one first."""

    def add(self, request_id: str, embedding: Tensor) -> None:
        """Hold the embedding of a request's item, [num_embeds, hidden_size]."""
        self._embeddings[request_id] = embedding

    def release(self, request_id: str) -> None:
        self._embeddings.pop(request_id, None)
        self._slots.pop(request_id, None)

    def plan(self, request_ids: Sequence[str], query_start_loc: Sequence[int]) -> AttendItems:
        """Return the attention of a step. For `query_start_loc` see `plan_step`."""
        for request_id in dict.fromkeys(request_ids):
            self._slots[request_id] = self._take_slot(request_id, request_ids)
        slots = [self._slots[request_id] for request_id in request_ids]
        plan = self._plan_reads(slots, query_start_loc)

        def attend(layer: int, query: Tensor, scale: float) -> Tensor:
            return paged_attention(query, *self._cache[layer], plan, scale)

        return attend

    def _take_slot(self, request_id: str, in_step: Sequence[str]) -> int:
        """Return the slot of a request, with its keys and values."""
        if (slot := self._slots.pop(request_id, None)) is not None:
            return slot
        if len(self._slots) < self._num_slots:
            slot = min(set(range(self._num_slots)).difference(self._slots.values()))
        else:
            oldest = next(name for name in self._slots if name not in in_step)
            slot = self._slots.pop(oldest)
        projected = self._family.project(self._embeddings[request_id])
        if not self._cache:
            zeros = partial(torch.zeros, dtype=projected[0][0].dtype, device=projected[0][0].device)
            shapes = [(self._num_slots, *keys.shape) for keys, _ in projected]
            self._cache = [(zeros(shape), zeros(shape)) for shape in shapes]
        for (keys, values), (new_keys, new_values) in zip(self._cache, projected, strict=True):
            keys[slot], values[slot] = new_keys, new_values
        return slot

    def _plan_reads(self, slots: Sequence[int], query_start_loc: Sequence[int]) -> StepPlan:
        """Return the reads of a step. A slot is read like a block that holds a whole sequence."""
        keys, _ = self._cache[0]
        num_keys = keys.shape[1]
        decodes: list[tuple[int, int]] = []  # slots and rows
        chunks = []
        for slot, start, stop in zip(slots, query_start_loc, query_start_loc[1:], strict=False):
            if stop - start == 1:
                decodes.append((slot, start))
            else:
                mask = torch.zeros(1, num_keys, dtype=keys.dtype, device=keys.device)
                chunks.append(PrefillChunk(start, stop, slice(slot, slot + 1), num_keys, mask))
        groups = [
            DecodeGroup(
                rows=None
                if rows == [*range(query_start_loc[-1])]
                else torch.tensor(rows, device=keys.device),
                blocks=slice(first, first + len(rows)),
                num_decodes=len(rows),
                max_len=num_keys,
                mask=None,
            )
            for first, rows in _consecutive_runs(decodes)
        ]
        nothing_written = torch.empty(0, dtype=torch.int64)
        return StepPlan(nothing_written, {None: CacheReads(groups, chunks)})


def _consecutive_runs(decodes: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Return the first slot and the rows of each run of consecutive slots.

    The slots of a run are read by one call. Other slots would have to be copied next to each other,
    which is more work than the attention.
    """
    runs: list[tuple[int, list[int]]] = []
    for slot, row in sorted(decodes):
        if runs and slot == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(row)
        else:
            runs.append((slot, [row]))
    return runs
