"""Who runs in the next step, with how many tokens and in which blocks; integers only.

All that run have arrived before all that wait, for sequences are admitted by arrival and the last
of those that run is the first to be preempted. Both queues are therefore in order of arrival, and
the oldest sequence progresses at every step.
"""

from collections import deque

from workers.engine.blocks import BlockPool
from workers.engine.prefix import block_hashes
from workers.engine.sequence import Batch, ScheduledSequence, Sequence, Status


class Scheduler:
    """Two things keep the oldest sequence going: the pool holds one of `max_model_len`, and no
    more run than the budget has tokens, so that decodes leave it one.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        assert min(max_num_seqs, max_num_batched_tokens) >= 1
        assert pool.num_blocks * pool.block_size >= max_model_len
        self._pool = pool
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefix_caching = prefix_caching
        self.prefix_query_tokens = 0
        """Known tokens of all sequences when they were first admitted."""
        self.prefix_hit_tokens = 0
        """Those of them that were found in the cache."""
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release_blocks(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Batch:
        """Decodes come first: a prefill takes in chunks what they leave of the budget."""
        taken: dict[Sequence, int] = {}
        num_running = len(self._running)
        for sequence in sorted(self._running, key=_is_prefill):
            if sequence.status is Status.RUNNING:
                self._take(sequence, taken)
        # Blocks are short after a preemption: whoever came in now would be the next to go.
        if len(self._running) == num_running:
            self._admit(taken)
        return Batch(
            [
                ScheduledSequence(sequence, num_new, num_new == sequence.num_uncomputed_tokens)
                for sequence, num_new in taken.items()
            ]
        )

    def settle(self, batch: Batch) -> None:
        """The batch has been through the model.

        Blocks are registered when a token has been sampled behind them: it was chosen from numbers,
        and a single key or value that is none would have left none. So whatever else may fail,
        nothing that spoils others is ever found.
        """
        for s in batch.scheduled:
            s.sequence.num_computed_tokens += s.num_new_tokens
            if s.samples and self._prefix_caching:
                self._register_blocks(s.sequence)

    def _budget(self, taken: dict[Sequence, int]) -> int:
        return self._max_num_batched_tokens - sum(taken.values())

    def _admit(self, taken: dict[Sequence, int]) -> None:
        while self._budget(taken) and self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            cached = self._find_cached(sequence)
            if not self._can_admit(sequence, cached):
                return
            self._waiting.popleft()
            sequence.status = Status.RUNNING
            self._running.append(sequence)
            self._take_cached(sequence, cached)
            self._take(sequence, taken)

    def _can_admit(self, sequence: Sequence, cached: list[int]) -> bool:
        """Room for all known tokens is asked for, not for a chunk that might be thrown away."""
        num_missing = self._num_blocks(sequence.num_tokens) - len(cached)
        if not self._pool.can_allocate(num_missing, beside=cached):
            return False
        return not self._prefix_caching or self._prompt_is_ready(sequence, len(cached))

    def _prompt_is_ready(self, sequence: Sequence, num_cached: int) -> bool:
        """False while another choice of its request computes prompt blocks that it can share."""
        num_shared = self._num_full(min(sequence.num_prompt_tokens, sequence.num_tokens - 1))
        return num_cached >= num_shared or not any(
            other.request is sequence.request and other.num_registered_blocks < num_shared
            for other in self._running
        )

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """All but its last token may come from the cache: that one has to yield logits."""
        if not self._prefix_caching or not sequence.reads_prefix_cache:
            return []
        num_full = self._num_full(sequence.num_tokens - 1)
        return self._pool.find(block_hashes(sequence, num_full, self._pool.block_size))

    def _take_cached(self, sequence: Sequence, cached: list[int]) -> None:
        self._pool.share(cached)
        sequence.block_table += cached
        sequence.num_registered_blocks = len(cached)
        sequence.num_computed_tokens = len(cached) * self._pool.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(
                sequence.num_computed_tokens, sequence.num_prompt_tokens
            )
            if self._prefix_caching:
                self.prefix_query_tokens += sequence.num_tokens
                self.prefix_hit_tokens += sequence.num_computed_tokens

    def _take(self, sequence: Sequence, taken: dict[Sequence, int]) -> None:
        """Blocks for its next tokens, at the cost of the latest, which may be itself."""
        num_new_tokens = min(sequence.num_uncomputed_tokens, self._budget(taken))
        if num_new_tokens == 0:
            return
        num_blocks = self._num_blocks(sequence.num_computed_tokens + num_new_tokens)
        num_missing = num_blocks - len(sequence.block_table)
        while not self._pool.can_allocate(num_missing):
            latest = self._preempt_latest()
            taken.pop(latest, None)
            if latest is sequence:
                return
        sequence.block_table += self._pool.allocate(num_missing)
        taken[sequence] = num_new_tokens

    def _preempt_latest(self) -> Sequence:
        sequence = self._running.pop()
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)
        return sequence

    def _register_blocks(self, sequence: Sequence) -> None:
        first, stop = sequence.num_registered_blocks, self._num_full(sequence.num_computed_tokens)
        if first < stop:
            hashes = block_hashes(sequence, stop, self._pool.block_size)
            for i in range(first, stop):
                self._pool.register(sequence.block_table[i], hashes[i])
            sequence.num_registered_blocks = stop

    def _release_blocks(self, sequence: Sequence) -> None:
        self._pool.release(reversed(sequence.block_table))
        sequence.block_table.clear()

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _num_full(self, num_tokens: int) -> int:
        return num_tokens // self._pool.block_size


def _is_prefill(sequence: Sequence) -> bool:
    return sequence.num_uncomputed_tokens > 1
