"""A batch of sequences through the model: integers in, tokens for each sampling one out.

It owns the KV tensors, the positions of each prompt, and the embeddings of items: each request's
own, as far as its batches need them, and beyond it those that may come again. It decides nothing
about who runs when.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRequest
from shared.lru import ByteLRU
from shared.models.tower import Tower
from shared.protocol.multimodal import PlaceholderRange
from workers.engine.core.sequence import Batch, EngineRequest, Item, SampledToken, ScheduledSequence
from workers.engine.model.flat_model import DecoderModel
from workers.engine.model.lora import Adapters
from workers.engine.sampling.logprobs import logprobs_of
from workers.engine.sampling.verifier import sample_batch


@dataclass(frozen=True, slots=True)
class _Prepared:
    prompt_positions: tuple[NDArray[np.int64], int]  # [num_position_rows, num_tokens]; delta behind
    # Place in the prompt, [num_embeds, width]; only what a batch has needed.
    embeddings: list[tuple[PlaceholderRange, Tensor]] = field(default_factory=list)


class ModelRunner:
    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        block_size: int,
        tower: Tower | None = None,
        embedding_cache_bytes: int = 0,
        on_encoded: Callable[[str, Tensor], None] = lambda mm_hash, embedding: None,
        adapters: Adapters | None = None,
    ) -> None:
        """Without a tower all items must come with their embeddings. `on_encoded` is told of all
        that it makes, and may keep them."""
        self.encoded_items = 0
        self._model = model
        self._tower = tower
        self._on_encoded = on_encoded
        self._adapters = adapters or Adapters()
        self._kv_cache = model.new_cache(num_blocks, block_size)
        model.capture(self._kv_cache)
        self._prepared: dict[str, _Prepared] = {}
        # By mm_hash, which differs between tenants.
        self._embeddings: ByteLRU[str, Tensor] = ByteLRU(embedding_cache_bytes)
        self._no_positions = np.empty((model.family.num_position_rows, 0), dtype=np.int64)

    @property
    def mm_cache_queries(self) -> int:
        return self._embeddings.hits + self._embeddings.misses

    @property
    def mm_cache_hits(self) -> int:
        return self._embeddings.hits

    @torch.inference_mode()
    def prepare(self, request: EngineRequest) -> None:
        """Raises what is wrong with the request, here and not in a batch that it shares."""
        family = self._model.family
        self._adapters.check(request.adapter)
        family.check(request)
        if self._tower is None and any(item.embedding is None for item in request.items):
            raise InvalidRequest("an item has no embeddings, and no tower is here", field="items")
        if request.items:
            positions = family.locate(request)
            self._prepared[request.request_id] = _Prepared(
                (self._no_positions, 0)
                if positions is None
                else (positions.prompt.numpy(), positions.delta)
            )

    def encode(self, request: EngineRequest, item_indexes: Sequence[int]) -> None:
        """Of a request that is prepared; those that the cache has do not go through the tower."""
        items = [request.items[index] for index in item_indexes]
        found, new = {}, {}
        for item in items:
            if item.embedding is not None:
                found[item.mm_hash] = item.embedding.to(self._model.device, self._model.dtype)
            elif (embedding := self._embeddings.get(item.mm_hash)) is not None:
                found[item.mm_hash] = embedding
            else:
                new[item.mm_hash] = item
        if new:
            found |= self._run_tower(list(new.values()))
        for item in items:
            embedding = found[item.mm_hash]
            assert len(embedding) == item.placeholder.num_embeds, "one hash, two contents"
            self._prepared[request.request_id].embeddings.append((item.placeholder, embedding))

    def _run_tower(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Embeddings of the items, by mm_hash: [num_embeds, width] each."""
        assert self._tower is not None
        embeddings = self._tower.encode([item.fields for item in items])
        self.encoded_items += len(items)
        made = {}
        for item, embedding in zip(items, embeddings, strict=True):
            # A view of the tower's whole output would keep all of it for as long as one item.
            made[item.mm_hash] = embedding.clone()
            self._embeddings.put(item.mm_hash, made[item.mm_hash], embedding.nbytes)
            self._on_encoded(item.mm_hash, made[item.mm_hash])
        return made

    def release(self, request_id: str) -> None:
        self._prepared.pop(request_id, None)

    @torch.inference_mode()
    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """(source, destination): all sources are read before anything is written."""
        source, destination = (
            self._to_device(list(blocks)) for blocks in zip(*copies, strict=True)
        )
        for caches in self._kv_cache:
            for cache in caches:
                cache.index_copy_(0, destination, cache.index_select(0, source))

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        index = self._to_device(blocks)
        for keys, values in self._kv_cache:
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[list[SampledToken]]:
        scheduled = batch.scheduled
        lengths = [s.num_new_tokens for s in scheduled]
        query_start_loc = [0, *np.cumsum(lengths).tolist()]
        plan = self._model.plan(
            [s.sequence.block_table for s in scheduled],
            query_start_loc,
            [_stop(s) for s in scheduled],
            self._kv_cache,
        )
        self._adapters.assign([s.sequence.request.adapter for s in scheduled], query_start_loc)
        sampling = [i for i, s in enumerate(scheduled) if s.samples]
        rows: list[int] = []
        for i in sampling:
            stop = query_start_loc[i + 1]
            rows += range(stop - 1 - len(scheduled[i].draft_token_ids), stop)
        num_sampled = len(rows)
        for s, first_row in zip(scheduled, query_start_loc, strict=False):
            rows += range(first_row, first_row + _num_prompt_rows(s))
        embeddings, deepstack = self._embed(scheduled, query_start_loc)
        logits = self._model.forward(
            embeddings,
            self._locate(scheduled),
            plan,
            self._kv_cache,
            self._to_device(rows),
            deepstack,
        )
        sampled = sample_batch(logits[:num_sampled], [scheduled[i] for i in sampling])
        if len(rows) > num_sampled:
            _note_prompt_logprobs(logits[num_sampled:], scheduled)
        tokens: list[list[SampledToken]] = [[] for _ in scheduled]
        for i, found in zip(sampling, sampled, strict=True):
            tokens[i] = found
        return tokens

    def _embed(
        self, scheduled: list[ScheduledSequence], query_start_loc: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings of tokens, and over them those of the items: [num_tokens, hidden_size].

        And what the items bring for the decoder's first layers, if any does:
        [num_levels, num_tokens, hidden_size], zeros in all other rows.
        """
        token_ids: list[int] = []
        for s in scheduled:
            token_ids += s.sequence.token_ids[s.sequence.num_computed_tokens : _stop(s)]
            token_ids += s.draft_token_ids
        rows = self._model.embed(self._to_device(token_ids))
        num_tokens, width = rows.shape
        levels: Tensor | None = None
        for s, first_row in zip(scheduled, query_start_loc, strict=False):
            prepared = self._prepared.get(s.sequence.request_id)
            for placeholder, embedding in prepared.embeddings if prepared else []:
                # Both hold tokens [offset, offset + length) and [num_computed_tokens, stop).
                offset = placeholder.offset
                start = max(offset, s.sequence.num_computed_tokens)
                stop = min(offset + placeholder.length, _stop(s))
                if start < stop:
                    row = first_row + start - s.sequence.num_computed_tokens
                    span = slice(row, row + stop - start)
                    _place(rows[span], embedding[:, :width], placeholder, start - offset)
                    if embedding.shape[1] == width:
                        continue
                    if levels is None:
                        levels = rows.new_zeros(num_tokens, embedding.shape[1] - width)
                    _place(levels[span], embedding[:, width:], placeholder, start - offset)
        if levels is None:
            return rows, None
        return rows, levels.view(num_tokens, -1, width).transpose(0, 1)

    def _locate(self, scheduled: list[ScheduledSequence]) -> Tensor:
        """Rotary positions: [num_position_rows, num_tokens]."""
        return self._to_device(np.concatenate([self._locate_one(s) for s in scheduled], axis=1))

    def _locate_one(self, s: ScheduledSequence) -> NDArray[np.int64]:
        start, stop = s.sequence.num_computed_tokens, _stop(s)
        prepared = self._prepared.get(s.sequence.request_id)
        prompt, delta = prepared.prompt_positions if prepared else (self._no_positions, 0)
        # [start, num_known) are looked up, the tokens behind them are counted on.
        num_known = prompt.shape[1]
        known = prompt[:, start:stop]
        counted = np.arange(max(start, num_known), max(stop, num_known)) + delta
        return np.concatenate([known, np.tile(counted, (len(prompt), 1))], axis=1)

    def _to_device(self, values: list[int] | list[list[int]] | NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self._model.device)


def _place(rows: Tensor, embedding: Tensor, placeholder: PlaceholderRange, start: int) -> None:
    """Put embeddings over the rows of the placeholder's tokens [start, start + len(rows))."""
    if placeholder.is_embed is None:
        rows[:] = embedding[start : start + len(rows)]
        return
    indexes = placeholder.embed_indexes()
    first = bisect.bisect_left(indexes, start)
    last = bisect.bisect_left(indexes, start + len(rows))
    places = torch.tensor(indexes[first:last], dtype=torch.int64, device=rows.device) - start
    rows[places] = embedding[first:last]


def _num_prompt_rows(s: ScheduledSequence) -> int:
    """Of its tokens, from the first on: those before a token of the prompt of which the log
    probability is asked for."""
    if s.sequence.prompt_logprobs is None:
        return 0
    stop = min(_stop(s), s.sequence.num_prompt_tokens - 1)
    return max(0, stop - s.sequence.num_computed_tokens)


def _note_prompt_logprobs(logits: Tensor, scheduled: list[ScheduledSequence]) -> None:
    """A run that is repeated, or a prompt computed again after a preemption, notes the same."""
    for s in scheduled:
        num_rows, sequence = _num_prompt_rows(s), s.sequence
        if num_rows == 0 or sequence.prompt_logprobs is None:
            continue
        places = range(
            sequence.num_computed_tokens + 1, sequence.num_computed_tokens + 1 + num_rows
        )
        found = logprobs_of(
            logits[:num_rows],
            list(range(num_rows)),
            [sequence.token_ids[place] for place in places],
            [sequence.request.sampling.prompt_logprobs or 0] * num_rows,
        )
        sequence.prompt_logprobs.update(zip(places, found, strict=True))
        logits = logits[num_rows:]


def _stop(s: ScheduledSequence) -> int:
    """Tokens [num_computed_tokens, this) go through the model."""
    return s.sequence.num_computed_tokens + s.num_new_tokens
