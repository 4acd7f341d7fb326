"""Stand-ins for what needs a model; they check what they are given as they go."""

import hashlib
from collections.abc import Iterable

from shared.errors import InvalidMedia
from workers.engine.sequence import Batch, EngineRequest, ScheduledSequence, Sequence

Owner = tuple[str, int]


class FakeRunner:
    """Tokens from a hash of what came before, and a KV store that remembers who wrote each slot."""

    def __init__(
        self,
        block_size: int,
        vocab_size: int,
        *,
        fails_to_encode: Iterable[str] = (),
        fails_to_run: Iterable[str] = (),
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._fails_to_encode = set(fails_to_encode)
        self._fails_to_run = set(fails_to_run)
        self._slots: dict[tuple[int, int], tuple[Owner, int, int]] = {}
        self.encoded: set[str] = set()
        self.scrubbed: list[int] = []
        self.batches: list[int] = []
        """Tokens of each batch."""

    def encode(self, request: EngineRequest) -> None:
        assert request.request_id not in self.encoded, "encoded twice"
        if request.request_id in self._fails_to_encode:
            raise InvalidMedia("a poisoned picture")
        self.encoded.add(request.request_id)

    def release(self, request_id: str) -> None:
        self.encoded.discard(request_id)

    def scrub(self, blocks: list[int]) -> None:
        self.scrubbed += blocks

    def run(self, batch: Batch) -> list[int | None]:
        self.batches.append(batch.num_tokens)
        for s in batch.scheduled:
            assert s.sequence.request_id in self.encoded
            if s.sequence.request_id in self._fails_to_run:
                raise RuntimeError("a poisoned request")
            self._write(s)
        for s in batch.scheduled:
            self._verify(s)
        return [self.next_token(s.sequence) if s.samples else None for s in batch.scheduled]

    def next_token(self, sequence: Sequence) -> int:
        seen = repr((sequence.seed, sequence.choice, sequence.token_ids)).encode()
        return int.from_bytes(hashlib.sha256(seen).digest()[:8], "big") % self._vocab_size

    def _write(self, s: ScheduledSequence) -> None:
        for position in range(s.sequence.num_computed_tokens, _stop(s)):
            self._slots[self._slot(s.sequence, position)] = _content(s.sequence, position)

    def _verify(self, s: ScheduledSequence) -> None:
        assert s.num_new_tokens > 0
        assert s.samples == (_stop(s) == s.sequence.num_tokens)
        for position in range(_stop(s)):
            found = self._slots[self._slot(s.sequence, position)]
            assert found == _content(s.sequence, position), "a block is used by two sequences"

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self._block_size)
        return sequence.block_table[block], slot


def _stop(s: ScheduledSequence) -> int:
    return s.sequence.num_computed_tokens + s.num_new_tokens


def _content(sequence: Sequence, position: int) -> tuple[Owner, int, int]:
    return (sequence.request_id, sequence.choice), sequence.token_ids[position], position
