"""Fakes of the drafter and the model runner, which check their input at every step."""

import hashlib
import random
from collections.abc import Callable, Collection, Iterable
from typing import Any

from shared.errors import InvalidMedia
from shared.protocol.multimodal import HashPart
from workers.engine.core.sequence import (
    Batch,
    EngineRequest,
    Item,
    SampledToken,
    ScheduledSequence,
    Sequence,
    Span,
)

CONTENT_BYTES = hashlib.sha256().digest_size
"""Size of a slot's content."""


class ShakyDrafter:
    """Drafter that predicts each token correctly with probability `share`, otherwise at random."""

    def __init__(
        self,
        predict: Callable[[list[int]], int | None],
        rng: random.Random,
        vocab_size: int,
        share: float = 0.7,
    ) -> None:
        self._predict = predict
        self._rng = rng
        self._vocab_size = vocab_size
        self._share = share
        self.recorded: list[tuple[int, int]] = []

    def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(self._rng.randint(0, 6)):
            token_id = self._predict(token_ids + drafts)
            if token_id is None or self._rng.random() > self._share:
                token_id = self._rng.randrange(self._vocab_size)
            drafts.append(token_id)
        return drafts[: max(0, max_drafts)]

    def record_result(self, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.recorded.append((num_drafts, num_accepted))


class FakeRunner:
    """Runner with hashes of the preceding tokens as tokens, and a KV store of such hashes.

    Like keys and values, the content of a slot depends on the token, on the slots before it and on
    the image at its position. All slots of a sequence are verified before every sample.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int,
        *,
        fails_to_prepare: Iterable[str] = (),
        fails_to_encode: Iterable[str] = (),
        fails_to_run: Iterable[str] = (),
        failure: Exception | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`failure` replaces the errors of requests that fail.

        Batches with more than `max_tokens` tokens raise MemoryError.
        """
        self._failure = failure
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._fails_to_prepare = set(fails_to_prepare)
        self._fails_to_encode = set(fails_to_encode)
        self._fails_to_run = set(fails_to_run)
        self.max_tokens = max_tokens
        self._slots: dict[tuple[int, int], bytes] = {}
        self._prepared: dict[str, set[int]] = {}
        """Indexes of the items that have embeddings, by request."""
        self.num_free_positions = 1 << 20
        self.encoded_items = 0
        self.mm_cache_queries = self.mm_cache_hits = 0
        self.zeroed: list[int] = []
        self.copied: list[tuple[int, int]] = []
        self.batches: list[int] = []
        """Number of tokens of each batch."""
        self.sampled: list[int] = []
        """Tokens that the last batch has sampled, as they would be on a device."""
        self.encoded: list[list[str]] = []
        """Requests of each call of `encode`."""

    @property
    def is_empty(self) -> bool:
        return not self._prepared

    def check(self, request: EngineRequest) -> int:
        return self.num_free_positions

    def spans_of(self, request: EngineRequest) -> list[Span]:
        return []

    def prepare(self, request: EngineRequest) -> None:
        assert request.request_id not in self._prepared, "prepared twice"
        if request.request_id in self._fails_to_prepare:
            raise self._failure or InvalidMedia("no positions for the image")
        self._prepared[request.request_id] = set()

    def begin_encoding(self, request: EngineRequest, indexes: Collection[int]) -> set[int]:
        return set()

    def take_embedding(self, item: Item, embedding: Any) -> None:
        item.embedding = embedding

    def encode(self, requests: Collection[tuple[EngineRequest, Collection[int]]]) -> int:
        self.encoded.append([request.request_id for request, _ in requests])
        if self._fails_to_encode.intersection(self.encoded[-1]):
            raise self._failure or InvalidMedia("a poisoned image")
        num_tokens = 0
        for request, item_indexes in requests:
            prepared = self._prepared[request.request_id]
            assert item_indexes
            assert not prepared.intersection(item_indexes), "encoded twice"
            prepared.update(item_indexes)
            self.encoded_items += len(item_indexes)
            num_tokens += sum(request.items[index].placeholder.length for index in item_indexes)
        return num_tokens

    def recover_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def release(self, request_id: str) -> None:
        self._prepared.pop(request_id, None)

    def zero_blocks(self, blocks: list[int]) -> None:
        self.zeroed += blocks
        for block in blocks:
            for slot in range(self._block_size):
                self._slots.pop((block, slot), None)

    # -- KVMemory, for tests whose engines exchange blocks -----------------------------------------

    @property
    def layout(self) -> list[HashPart]:
        return ["fake"]

    @property
    def block_bytes(self) -> int:
        return self._block_size * CONTENT_BYTES

    def read_blocks(self, blocks: list[int]) -> list[memoryview]:
        slots = ((block, slot) for block in blocks for slot in range(self._block_size))
        return [memoryview(self._slots[slot]) for slot in slots]

    def write_blocks(self, blocks: list[int], data: memoryview, skip: int) -> None:
        for index, block in enumerate(blocks, skip):
            for slot in range(self._block_size):
                start = (index * self._block_size + slot) * CONTENT_BYTES
                self._slots[block, slot] = bytes(data[start : start + CONTENT_BYTES])

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.copied.append((source, destination))
            for slot in range(self._block_size):
                if (content := self._slots.get((source, slot))) is not None:
                    self._slots[destination, slot] = content

    def launch(self, batch: Batch) -> "FakeLaunched":
        self.batches.append(batch.num_tokens)
        if self.max_tokens is not None and batch.num_tokens > self.max_tokens:
            raise MemoryError
        for s in batch.scheduled:
            assert s.sequence.request_id in self._prepared
            if s.sequence.request_id in self._fails_to_run:
                raise self._failure or RuntimeError("a poisoned request")
            self._write(s)
        for s in batch.scheduled:
            self._verify(s)
        return FakeLaunched(self, batch)

    def sample(self, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
        """Return the tokens of a launched batch, or of a part of it."""
        for s in scheduled:
            if s.samples and not s.sequence.samples_tokens:
                s.sequence.embedding = bytes(s.sequence.token_ids)
        return [self._sample(s) if s.samples_token else [] for s in scheduled]

    def _sample(self, s: ScheduledSequence) -> list[SampledToken]:
        assert s.sequence.num_tokens == s.end - len(s.draft_token_ids), "not all tokens are known"
        sampled: list[int] = []
        for draft in (*s.draft_token_ids, None):
            sampled.append(self.next_token(s.sequence, sampled))
            if sampled[-1] != draft:
                break
        return [SampledToken(token_id) for token_id in sampled]

    def next_token(self, sequence: Sequence, appended: Iterable[int] = ()) -> int:
        content = repr((sequence.seed, sequence.choice, [*sequence.token_ids, *appended])).encode()
        return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % self._vocab_size

    def _write(self, s: ScheduledSequence) -> None:
        start, stop, request = s.start, s.end, s.sequence.request
        embedded = self._prepared[s.sequence.request_id]
        assert embedded.issuperset(request.items_within(start, stop)), "no embeddings"
        before = self._slots[self._slot(s.sequence, start - 1)] if start else _root(request)
        for position in range(start, stop):
            before = self._content(s, position, before)
            self._slots[self._slot(s.sequence, position)] = before

    def _verify(self, s: ScheduledSequence) -> None:
        assert s.num_new_tokens > 0
        num_drafts = len(s.draft_token_ids)
        assert s.samples == (s.end - num_drafts == s.sequence.num_tokens)
        assert s.samples or num_drafts == 0
        before = _root(s.sequence.request)
        for position in range(s.end):
            before = self._content(s, position, before)
            stored = self._slots[self._slot(s.sequence, position)]
            assert stored == before, "a block holds what another sequence has written"

    def _content(self, s: ScheduledSequence, position: int, before: bytes) -> bytes:
        request = s.sequence.request
        num_tokens, token_ids = s.sequence.num_tokens, s.sequence.token_ids
        drafts = s.draft_token_ids
        token_id = token_ids[position] if position < num_tokens else drafts[position - num_tokens]
        if token_id < 0:
            assert position == s.end - 1, "only the last token is awaited"
            token_id = self.sampled[-1 - token_id]
        items = [request.items[i] for i in request.items_within(position, position + 1)]
        filled = [(item.mm_hash, position - item.placeholder.offset) for item in items]
        return hashlib.sha256(before + repr((token_id, filled)).encode()).digest()

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self._block_size)
        return sequence.block_table[block], slot


class FakeLaunched:
    """Batch of a `FakeRunner`. Its tokens can only be sampled once, and before the next launch."""

    def __init__(self, runner: FakeRunner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._tokens: list[list[SampledToken]] | None = None

    def sample(self, indexes: Iterable[int]) -> None:
        assert self._tokens is None, "sampled twice"
        self._tokens = self._runner.sample([self._batch.scheduled[i] for i in indexes])
        self._runner.sampled = [tokens[-1].token_id for tokens in self._tokens if tokens]

    def result(self) -> list[list[SampledToken]]:
        assert self._tokens is not None
        return self._tokens


def _root(request: EngineRequest) -> bytes:
    return request.tenant.encode()
