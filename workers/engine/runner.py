"""Model runner: runs batches of sequences through the model and returns the sampled tokens.

The runner owns the KV cache, the rotary positions of prompts, and the embeddings of items that
running requests need. It caches embeddings for later requests. Scheduling is the engine core's
task.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.codec.tensors import from_torch
from shared.errors import InvalidRequest
from shared.helpers.device_errors import is_device_lost, is_out_of_memory
from shared.helpers.lru import ByteLRU
from shared.models.language import AttendItems, PromptPositions
from shared.models.tower import Tower
from shared.protocol.multimodal import HashPart, PlaceholderRange
from workers.engine.core.kv_exchange import NotWritten
from workers.engine.core.sequence import Batch, EngineRequest, Item, ScheduledSequence, Span
from workers.engine.item_encoder import ItemEncoder, OnEncoded
from workers.engine.launched_batch import LaunchedBatch
from workers.engine.model.flat_model import BatchLayout, DecoderModel, StepInputs
from workers.engine.model.item_attention import ItemAttention
from workers.engine.model.item_rows import scatter_embeddings
from workers.engine.model.lora import Adapters
from workers.engine.model.talker import SpeechRows, Talker
from workers.engine.pooling import check_dimensions
from workers.engine.step_clock import StepClock
from workers.engine.step_rows import StepRows
from workers.engine.transfers import upload, upload_parts

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _RequestInputs:
    """Inputs of a request with items or a speech."""

    # Positions [num_position_rows, num_tokens] of the prompt, and the offset of later tokens.
    prompt_positions: tuple[NDArray[Any], float]
    # Embeddings [num_embeds, width] of the items that batches have needed so far.
    embeddings: list[tuple[PlaceholderRange, Tensor]] = field(default_factory=list)
    speech: SpeechRows | None = None


class ModelRunner:
    """Runs a decoder model; implements `workers.engine.core.step_runner.StepRunner`."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        block_size: int,
        tower: Tower | None = None,
        embedding_cache_bytes: int = 0,
        on_encoded: OnEncoded | None = None,
        adapters: Adapters | None = None,
        max_num_seqs: int = 1,
        encoder: ItemEncoder | None = None,
        clock: StepClock | None = None,
    ) -> None:
        """If `tower` is None, all items must come with embeddings.

        `on_encoded` is called for the items that are encoded in a step. The `encoder` encodes items
        outside of steps; without it, steps encode all of them. `max_num_seqs` limits the requests
        in a batch, and with it the memory for the states of recurrent layers and for items of cross
        attention. The times of steps are added to `clock`.
        """
        self._num_encoded = 0
        self._clock = clock or StepClock(model.device)
        self._encoder = encoder
        self._encoding: set[str] = set()
        """Requests that have items in the encoder, or had some."""
        self._model = model
        self._sampled = torch.empty(0, dtype=torch.int64, device=model.device)
        """Tokens that the last batch has sampled. The next batch may await them."""
        self._talker = model.family if isinstance(model.family, Talker) else None
        self._tower = tower
        self._on_encoded = on_encoded
        self._adapters = adapters or Adapters()
        self._kv_cache = model.new_cache(num_blocks, block_size)
        self._states = model.new_states(max_num_seqs)
        model.capture(self._kv_cache)
        self._prepared: dict[str, _RequestInputs] = {}
        self._attention: ItemAttention | None = None
        if model.family.attends_items:
            self._attention = ItemAttention(model.family, max_num_seqs)
        # Keyed by mm_hash, which differs between tenants.
        self._embeddings: ByteLRU[str, Tensor] = ByteLRU(embedding_cache_bytes)
        family = model.family
        self._no_positions = np.empty((family.num_position_rows, 0), family.position_type)

    @property
    def encoded_items(self) -> int:
        num_apart = 0 if self._encoder is None else self._encoder.thread.num_encoded
        return self._num_encoded + num_apart

    @property
    def mm_cache_queries(self) -> int:
        return self._embeddings.hits + self._embeddings.misses

    @property
    def mm_cache_hits(self) -> int:
        return self._embeddings.hits

    @torch.inference_mode()
    def check(self, request: EngineRequest) -> int:
        """Validate the request, and return the number of positions after its prompt.

        Raises UnknownAdapter, UnsupportedContent and InvalidRequest.
        """
        family = self._model.family
        self._adapters.check(request.adapter)
        family.check(request)
        check_dimensions(request.embedding, family.decoder.config.hidden_size)
        if self._tower is None and any(item.embedding is None for item in request.items):
            raise InvalidRequest(
                "an item has no embedding, and the engine has no tower", field="items"
            )
        if self._talker is not None:
            located = self._talker.locate_speech(request.speech)
            return family.count_positions_after(located, len(request.prompt_token_ids))
        return family.count_free_positions(request)

    def spans_of(self, request: EngineRequest) -> list[Span]:
        return self._model.family.spans_of(request)

    @torch.inference_mode()
    def prepare(self, request: EngineRequest) -> None:
        """Compute the positions of a checked request, or the rows of a talker's prompt.

        Raises InvalidRequest for a text that a talker cannot speak.
        """
        family = self._model.family
        if self._talker is not None:
            positions = self._positions_of(self._talker.locate_speech(request.speech))
            speech = self._talker.speech_rows_of(request.speech)
            self._prepared[request.request_id] = _RequestInputs(positions, speech=speech)
        elif request.items:
            positions = self._positions_of(family.locate(request))
            self._prepared[request.request_id] = _RequestInputs(positions)

    def _positions_of(self, located: PromptPositions | None) -> tuple[NDArray[Any], float]:
        if located is None:
            return self._no_positions, 0
        return located.prompt.numpy(), located.delta

    def begin_encoding(self, request: EngineRequest, indexes: Sequence[int]) -> set[int]:
        awaited: set[int] = set()
        if self._encoder is None:
            return awaited
        for index in indexes:
            item = request.items[index]
            if item.embedding is None:
                item.embedding = self._embeddings.get(item.mm_hash)
            if item.embedding is None:
                awaited.add(index)
                self._encoding.add(request.request_id)
                self._encoder.start(request, item)
        return awaited

    def take_embedding(self, item: Item, embedding: Tensor) -> None:
        if embedding.is_cuda:
            # Its memory came from the tower's stream, and this stream may read it after its end.
            embedding.record_stream(torch.cuda.current_stream())
        item.embedding = embedding
        self._embeddings.put(item.mm_hash, embedding, embedding.nbytes)

    @torch.inference_mode()
    def encode(self, requests: Sequence[tuple[EngineRequest, Sequence[int]]]) -> int:
        """Attach embeddings to prepared requests: their own, cached, or computed by the tower.

        Items without embeddings go through the tower together. The rounding of an embedding may
        depend on the other items, as the rounding of logits depends on the other sequences.
        """
        pairs = [(request, request.items[i]) for request, indexes in requests for i in indexes]
        embeddings, new = {}, {}
        for _, item in pairs:
            if item.embedding is not None:
                embeddings[item.mm_hash] = item.embedding.to(self._model.device, self._model.dtype)
            elif (embedding := self._embeddings.get(item.mm_hash)) is not None:
                embeddings[item.mm_hash] = embedding
            else:
                new[item.mm_hash] = item
        if new:
            embeddings |= self._run_tower(list(new.values()))
        adapter = self._model.family.tower
        for _, item in pairs:
            is_own = adapter is None or len(embeddings[item.mm_hash]) == adapter.count(item.fields)
            assert is_own, "two contents have the same hash"
        for request, item in pairs:
            embedding = embeddings[item.mm_hash]
            if self._attention is not None:
                self._attention.add(request.request_id, embedding)
            else:
                inputs = self._prepared[request.request_id]
                inputs.embeddings.append((item.placeholder, embedding))
        return sum(item.placeholder.length for item in new.values())

    def _run_tower(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the embeddings of the items by mm_hash, each [num_embeds, width]."""
        assert self._tower is not None
        embeddings = self._tower.encode([item.fields for item in items])
        self._num_encoded += len(items)
        for item, embedding in zip(items, embeddings, strict=True):
            self._embeddings.put(item.mm_hash, embedding, embedding.nbytes)
            if self._on_encoded is not None:
                self._on_encoded(item.mm_hash, embedding)
        return dict(zip([item.mm_hash for item in items], embeddings, strict=True))

    def recover_memory(self, error: Exception) -> bool:
        if not is_out_of_memory(error):
            return False
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def release(self, request_id: str) -> None:
        self._prepared.pop(request_id, None)
        if self._encoder is not None and request_id in self._encoding:
            self._encoding.discard(request_id)
            self._encoder.forget(request_id)
        if self._attention is not None:
            self._attention.release(request_id)

    @torch.inference_mode()
    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._model.copy_blocks(self._kv_cache, copies)

    @torch.inference_mode()
    def zero_blocks(self, blocks: list[int]) -> None:
        self._model.zero_blocks(self._kv_cache, blocks)

    @property
    def layout(self) -> list[HashPart]:
        """Return the packing and the dtype of the KV cache, and the shapes of each layer's block.

        The shapes hold the size of a block, the number of heads and the size of a head.
        """
        shapes = [list(cache.shape[1:]) for caches in self._kv_cache for cache in caches]
        return [self._model.kv_packing, str(self._model.dtype), shapes]

    @property
    def block_bytes(self) -> int:
        return sum(cache[0].nbytes for caches in self._kv_cache for cache in caches)

    @torch.inference_mode()
    def read_blocks(self, blocks: list[int]) -> list[memoryview]:
        """Return copies of these blocks: the keys of the first layer, its values, and so on."""
        index = self._to_device(blocks)
        return [
            from_torch(cache.index_select(0, index)).data
            for caches in self._kv_cache
            for cache in caches
        ]

    @torch.inference_mode()
    def write_blocks(self, blocks: list[int], data: memoryview, skip: int) -> None:
        """Write blocks from the joined parts of `read_blocks`, without the first `skip` blocks."""
        index, start = self._to_device(blocks), 0
        num_held = data.nbytes // self.block_bytes
        for caches in self._kv_cache:
            for cache in caches:
                stop = start + num_held * cache[0].nbytes
                rows = torch.frombuffer(data[start:stop], dtype=cache.dtype)
                rows = rows.view(num_held, *cache.shape[1:])[skip : skip + len(blocks)]
                try:
                    cache.index_copy_(0, index, rows.to(cache.device))
                except RuntimeError as error:  # for example, the GPU has no memory for the rows
                    if is_device_lost(error):
                        raise
                    _log.warning("kv_not_written", blocks=len(blocks), exc_info=True)
                    raise NotWritten from error
                start = stop

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedBatch:
        with self._clock.computing():
            return self._launch(batch)

    def _launch(self, batch: Batch) -> LaunchedBatch:
        scheduled = batch.scheduled
        rows = StepRows(scheduled)
        tables = [s.sequence.block_table for s in scheduled]
        spans = [s.spans if s.sequence.spans else [] for s in scheduled]
        layout = BatchLayout(tables, rows.starts, [s.end for s in scheduled], spans)
        plan = self._model.plan(layout, self._kv_cache)
        slots = [s.sequence.state_slot for s in scheduled]
        states = self._states.step(rows.starts, layout.seq_lens, slots)
        if self._adapters:
            self._adapters.assign([s.sequence.request.adapter for s in scheduled], rows.starts)
        step_tokens = _gather_tokens(scheduled)
        inputs = [
            step_tokens,
            self._make_positions(scheduled, rows.starts),
            np.array(rows.logits, np.int64),
            np.array(rows.pooled_rows(), np.int64),
        ]
        parts = upload_parts(inputs, self._model.device)
        token_ids, positions, sampled_rows, pooled_rows = parts
        if step_tokens.min() < 0:
            # Tokens of the batch before. They may be known on the device alone.
            awaited = self._sampled[(-1 - token_ids).clamp(min=0)]
            token_ids = torch.where(token_ids < 0, awaited, token_ids)
        embeddings, deepstack = self._embed(token_ids, scheduled, rows.starts)
        hidden_rows, hidden = None, None
        if rows.pooled:
            hidden_rows = pooled_rows
            size = (len(hidden_rows), embeddings.shape[1])
            hidden = torch.empty(size, dtype=torch.float32, device=embeddings.device)
        elif self._talker is not None and self._talker.num_codebooks > 1:
            hidden_rows = sampled_rows
            hidden = embeddings.new_empty(len(sampled_rows), embeddings.shape[1])
        logits = self._model.forward(
            StepInputs(
                embeddings=embeddings,
                positions=positions,
                plan=plan,
                kv_cache=self._kv_cache,
                sampled_rows=sampled_rows,
                deepstack=deepstack,
                hidden_rows=hidden_rows,
                hidden=hidden,
                token_ids=token_ids,
                states=states,
                attend_items=self._attend_items(scheduled, rows.starts),
            )
        )
        talker = None if rows.pooled else self._talker
        return LaunchedBatch(
            scheduled,
            rows,
            logits,
            hidden,
            states,
            talker,
            self._model.draw,
            self._hold_sampled,
            self._clock,
        )

    def _hold_sampled(self, token_ids: Tensor) -> None:
        self._sampled = token_ids

    def _attend_items(
        self, scheduled: list[ScheduledSequence], query_start_loc: list[int]
    ) -> AttendItems | None:
        if self._attention is None:
            return None
        return self._attention.plan([s.sequence.request_id for s in scheduled], query_start_loc)

    def _embed(
        self, token_ids: Tensor, scheduled: list[ScheduledSequence], query_start_loc: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input embeddings [num_tokens, hidden_size], with items at their placeholders.

        The second tensor holds deepstack features for the decoder's first layers:
        [num_levels, num_tokens, hidden_size], zero in all other rows; None if no item has any.
        """
        rows = self._model.embed(token_ids)
        if not self._prepared:
            return rows, None
        num_tokens, width = rows.shape
        levels: Tensor | None = None
        for s, first_row in zip(scheduled, query_start_loc, strict=False):
            prepared = self._prepared.get(s.sequence.request_id)
            if self._talker is not None and prepared and prepared.speech:
                span = slice(first_row, first_row + s.num_new_tokens)
                self._talker.write_rows(rows[span], s, prepared.speech)
            for placeholder, embedding in prepared.embeddings if prepared else []:
                # The placeholder is [offset, offset + length); the step has tokens
                # [start, end).
                offset = placeholder.offset
                start = max(offset, s.start)
                stop = min(offset + placeholder.length, s.end)
                if start < stop:
                    row = first_row + start - s.start
                    span = slice(row, row + stop - start)
                    scatter_embeddings(
                        rows[span], embedding[:, :width], placeholder, start - offset
                    )
                    if embedding.shape[1] == width:
                        continue
                    if levels is None:
                        levels = rows.new_zeros(num_tokens, embedding.shape[1] - width)
                    scatter_embeddings(
                        levels[span], embedding[:, width:], placeholder, start - offset
                    )
        if levels is None:
            return rows, None
        return rows, levels.view(num_tokens, -1, width).transpose(0, 1)

    def _make_positions(
        self, scheduled: list[ScheduledSequence], starts: list[int]
    ) -> NDArray[Any]:
        """Return the rotary positions of the step, [num_position_rows, num_tokens].

        `starts` are the first rows of the sequences.
        """
        counts = np.array([s.num_new_tokens for s in scheduled])
        offsets = np.array([s.start for s in scheduled]) - np.array(starts[:-1])
        indexes = np.arange(starts[-1]) + np.repeat(offsets, counts)
        positions = np.empty((len(self._no_positions), starts[-1]), self._no_positions.dtype)
        positions[:] = indexes
        for s, begin in zip(scheduled, starts, strict=False) if self._prepared else ():
            if (prepared := self._prepared.get(s.sequence.request_id)) is None:
                continue
            prompt, delta = prepared.prompt_positions
            # The prompt's positions are computed in advance. Later positions are consecutive.
            middle = begin + max(0, min(s.end, prompt.shape[1]) - s.start)
            positions[:, begin:middle] = prompt[:, s.start : s.start + middle - begin]
            positions[:, middle : begin + s.num_new_tokens] += delta
        return positions

    def _to_device(self, values: list[int]) -> Tensor:
        return upload(values, self._model.device)


def _gather_tokens(scheduled: list[ScheduledSequence]) -> NDArray[np.int64]:
    """Return the tokens of a step, [num_tokens]; awaited tokens are negative."""
    token_ids: list[int] = []
    for s in scheduled:
        token_ids += s.sequence.token_ids[s.start : s.end]
        token_ids += s.draft_token_ids
    return np.array(token_ids, np.int64)
