"""Automatic prefix caching: KV blocks that a new sequence can share instead of computing them.

Two kinds of sharing exist. Full blocks are found by the hash of their content, whichever sequence
computed them (`prefix_caching`), as in vLLM. Choices of one request share their prompt: its full
blocks by reference, and the partly filled last block as a copy, because each choice continues to
write there. A model with states shares nothing, because a sequence needs the states after its
prefix, and the pool has only the states after the last token.

Tokens are shared only once they are verified, that is, after the next token has been sampled or
their embedding has been computed. Both require finite results, and a single key or value that is
NaN or infinite would have spoiled them. Sharing therefore never spreads the result of a failed
computation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from workers.engine.core.block_hash import block_hashes, extra_keys
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.kv_events import KVEvents
from workers.engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached prefix of a new sequence: its first `num_tokens` tokens are computed."""

    blocks: list[int]
    """Full blocks, to be shared by reference."""
    num_tokens: int
    tail: int | None = None
    """Block to be copied, with the tokens after `blocks`; None if there are no such tokens."""


class PrefixCache:
    """Finds and shares prefixes, and assigns and frees the blocks of sequences."""

    def __init__(
        self, pool: BlockPool, prefix_caching: bool, *, shares_prompts: bool = True
    ) -> None:
        """Choices of a request share their prompt if `shares_prompts`."""
        self.query_tokens = 0
        """Tokens of all sequences when they were first admitted."""
        self.hit_tokens = 0
        """Queried tokens that were cached."""
        self._pool = pool
        self._prefix_caching = prefix_caching
        self._shares_prompts = shares_prompts
        self._computed_by: dict[str, Sequence] = {}
        """Sequence that is computing the block with this hash."""
        self._unverified: list[int] = []
        self._choices: dict[str, list[Sequence]] = {}
        """Running choices by request id, for requests with several choices."""

    # -- before a sequence starts ---------------------------------------------------------------

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Return the longest cached prefix, without the last token, which has to yield logits."""
        match = PrefixMatch([], 0)
        if self._is_lookup_enabled(sequence):
            block_size = self._pool.block_size
            hashes = block_hashes(sequence, (sequence.num_tokens - 1) // block_size, block_size)
            blocks = self._pool.find(hashes)
            match = PrefixMatch(blocks, len(blocks) * block_size)
        sibling_match = self._match_sibling(sequence)
        return sibling_match if sibling_match.num_tokens > match.num_tokens else match

    def is_being_computed(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Return True if a sequence of higher priority computes the next full block of this one.

        The other sequence gets its share of each step's budget first, so waiting for it costs at
        most the rest of a step. Blocks that came with the request and are not restored yet count
        as being computed.
        """
        received = sequence.request.received
        if received is not None and received.runs:
            return True
        computing = self._find_computing(sequence, len(match.blocks))
        return computing is not None and computing.priority < sequence.priority

    def _match_sibling(self, sequence: Sequence) -> PrefixMatch:
        """Return the prompt prefix that a running choice of the same request holds."""
        if sequence.prompt_logprobs is not None:
            return PrefixMatch([], 0)
        sibling = max(self._siblings(sequence), key=lambda s: s.num_verified_tokens, default=None)
        if sibling is None:
            return PrefixMatch([], 0)
        num_tokens = min(sibling.num_verified_tokens, _num_shareable_tokens(sequence))
        num_full, remainder = divmod(num_tokens, self._pool.block_size)
        tail = sibling.block_table[num_full] if remainder else None
        return PrefixMatch(sibling.block_table[:num_full], num_tokens, tail)

    def _find_computing(self, sequence: Sequence, index: int) -> Sequence | None:
        """Return the sequence that is computing block `index`, if the block can be shared."""
        block_size = self._pool.block_size
        if self._is_lookup_enabled(sequence) and index < (sequence.num_tokens - 1) // block_size:
            return self._computed_by.get(sequence.block_hashes[index])
        if (
            sequence.prompt_logprobs is None
            and index < _num_shareable_tokens(sequence) // block_size
        ):
            return next(iter(self._siblings(sequence)), None)
        return None

    def _is_lookup_enabled(self, sequence: Sequence) -> bool:
        return self._prefix_caching and sequence.can_read_prefix_cache

    def _siblings(self, sequence: Sequence) -> list[Sequence]:
        return self._choices.get(sequence.request_id, []) if self._shares_prompts else []

    # -- while it runs ------------------------------------------------------------------------

    def start(self, sequence: Sequence, match: PrefixMatch) -> tuple[int, int] | None:
        """Assign the matched blocks to the sequence; return (source, destination) of a copy."""
        self._pool.share(match.blocks)
        sequence.block_table += match.blocks
        sequence.num_registered_blocks = len(match.blocks)
        sequence.num_computed_tokens = sequence.num_verified_tokens = match.num_tokens
        self._count_hits(sequence)
        self._mark_computing(sequence)
        if match.tail is None:
            return None
        (copy_target,) = self._pool.allocate(1)
        sequence.block_table.append(copy_target)
        return match.tail, copy_target

    def on_sampled(self, sequence: Sequence) -> None:
        """Mark all computed tokens as verified and register the blocks that are now full."""
        sequence.num_verified_tokens = sequence.num_computed_tokens
        if self._prefix_caching:
            num_full = sequence.num_computed_tokens // self._pool.block_size
            if num_full > sequence.num_registered_blocks:
                self._register_blocks(sequence, num_full)

    def free(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that has ended or is preempted."""
        for block_hash in sequence.block_hashes[sequence.num_registered_blocks :]:
            self._unmark_computing(block_hash, sequence)
        if sequence.request.sampling.n > 1:
            choices = self._choices[sequence.request_id]
            choices.remove(sequence)
            if not choices:
                del self._choices[sequence.request_id]
        if sequence.num_verified_tokens < sequence.num_launched_tokens:
            first = sequence.num_verified_tokens // self._pool.block_size
            self._unverified += sequence.block_table[first:]
        sequence.peak_blocks = max(sequence.peak_blocks, len(sequence.block_table))
        self._pool.release(reversed(sequence.block_table))
        sequence.block_table.clear()
        sequence.num_computed_tokens = sequence.num_verified_tokens = 0
        sequence.num_launched_tokens = 0

    def take_unverified_blocks(self) -> list[int]:
        """Return the freed blocks that hold unverified tokens.

        They have to be overwritten before the next run: their next owner masks the old content, but
        a NaN would pass the mask.
        """
        unverified, self._unverified = self._unverified, []
        return unverified

    def _count_hits(self, sequence: Sequence) -> None:
        if sequence.num_cached_tokens is not None:
            return
        num_found = sequence.num_computed_tokens if self._prefix_caching else 0
        sequence.num_cached_tokens = min(num_found, sequence.num_prompt_tokens)
        if self._prefix_caching:
            self.query_tokens += sequence.num_tokens
            self.hit_tokens += num_found

    def _mark_computing(self, sequence: Sequence) -> None:
        """Record the blocks that the sequence computes until its next sample."""
        if sequence.request.sampling.n > 1:
            self._choices.setdefault(sequence.request_id, []).append(sequence)
        if self._prefix_caching:
            block_size = self._pool.block_size
            hashes = block_hashes(sequence, sequence.num_tokens // block_size, block_size)
            for block_hash in hashes[sequence.num_registered_blocks :]:
                self._computed_by.setdefault(block_hash, sequence)

    def _unmark_computing(self, block_hash: str, sequence: Sequence) -> None:
        if self._computed_by.get(block_hash) is sequence:
            del self._computed_by[block_hash]

    def _register_blocks(self, sequence: Sequence, num_full: int) -> None:
        hashes = block_hashes(sequence, num_full, self._pool.block_size)
        registered = []
        for index in range(sequence.num_registered_blocks, num_full):
            self._unmark_computing(hashes[index], sequence)
            if self._pool.register(sequence.block_table[index], hashes[index]):
                registered.append(index)
        sequence.num_registered_blocks = num_full
        self._publish_registered(sequence, registered)

    def register_restored(self, sequence: Sequence, first: int, blocks: list[int]) -> None:
        """Make blocks findable that another engine has computed and verified.

        They are written, and hold the blocks of the sequence from index `first` on.
        """
        hashes = block_hashes(sequence, first + len(blocks), self._pool.block_size)
        self._publish_registered(
            sequence,
            [
                index
                for index, block in enumerate(blocks, first)
                if self._pool.register(block, hashes[index])
            ],
        )

    def _publish_registered(self, sequence: Sequence, registered: list[int]) -> None:
        if self._pool.events is not None:
            for first, stop in _consecutive_runs(registered):
                self._publish_stored(self._pool.events, sequence, first, stop)

    def _publish_stored(self, events: KVEvents, sequence: Sequence, first: int, stop: int) -> None:
        block_size, hashes = self._pool.block_size, sequence.block_hashes
        events.add_stored(
            hashes[first:stop],
            hashes[first - 1] if first else None,
            sequence.token_ids[first * block_size : stop * block_size],
            [extra_keys(sequence, index, block_size) for index in range(first, stop)],
            sequence.request.adapter,
        )


def _num_shareable_tokens(sequence: Sequence) -> int:
    """Return the number of prompt tokens shared with sibling choices, without the last token."""
    return min(sequence.num_prompt_tokens, sequence.num_tokens - 1)


def _consecutive_runs(indexes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield [first, stop) of each run of consecutive indexes."""
    for _, run in groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        yield members[0], members[-1] + 1
