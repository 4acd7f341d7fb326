"""What a sequence that begins need not compute, because others have, or are about to.

There are two ways to it. Full blocks are found by the hash of their content, whoever has computed
them (`prefix_caching`). Choices of one request share their prompt in any case: its full blocks by
reference, and of the block in which it ends each has a copy, for each goes on writing there.

Nothing is shared before a token has been sampled behind it: the token was chosen from numbers, and
a single key or value that is none would have left none. So whatever else may fail, nothing that
spoils others is ever found.
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
    """Of a sequence that is to begin: its first `num_tokens` tokens are computed."""

    blocks: list[int]
    """Full ones, to be held together with others."""
    num_tokens: int
    tail: int | None = None
    """The block of those tokens that are not in `blocks`; to be copied."""


class PrefixCache:
    def __init__(self, pool: BlockPool, prefix_caching: bool) -> None:
        self.query_tokens = 0
        """Known tokens of all sequences when they first began."""
        self.hit_tokens = 0
        """Those of them that were found."""
        self._pool = pool
        self._prefix_caching = prefix_caching
        self._underway: dict[str, Sequence] = {}
        """Who computes the block of this hash just now."""
        self._unsound: list[int] = []
        self._choices: dict[str, list[Sequence]] = {}
        """Those that run, by request; of requests with several."""

    # -- before it begins ----------------------------------------------------------------------

    def find(self, sequence: Sequence) -> PrefixMatch:
        """All but its last token may be shared: that one has to yield logits."""
        found = PrefixMatch([], 0)
        if self._looks_up(sequence):
            block_size = self._pool.block_size
            hashes = block_hashes(sequence, (sequence.num_tokens - 1) // block_size, block_size)
            blocks = self._pool.find(hashes)
            found = PrefixMatch(blocks, len(blocks) * block_size)
        forked = self._find_forked(sequence)
        return forked if forked.num_tokens > found.num_tokens else found

    def is_underway(self, sequence: Sequence, found: PrefixMatch) -> bool:
        """Whether one that comes before it is computing at least one more full block of its.

        That one has its share of each step's budget first, so whoever waits for it loses the rest
        of a step at most.
        """
        other = self._computing(sequence, len(found.blocks))
        return other is not None and other.turn < sequence.turn

    def _find_forked(self, sequence: Sequence) -> PrefixMatch:
        """Of the prompt, what one of the request's other choices holds."""
        if sequence.prompt_logprobs is not None:
            return PrefixMatch([], 0)
        other = max(self._others(sequence), key=lambda s: s.num_sound_tokens, default=None)
        if other is None:
            return PrefixMatch([], 0)
        num_tokens = min(other.num_sound_tokens, _num_common(sequence))
        num_full, rest = divmod(num_tokens, self._pool.block_size)
        tail = other.block_table[num_full] if rest else None
        return PrefixMatch(other.block_table[:num_full], num_tokens, tail)

    def _computing(self, sequence: Sequence, index: int) -> Sequence | None:
        """Who computes its block `index`, if it is one that it could share."""
        block_size = self._pool.block_size
        if self._looks_up(sequence) and index < (sequence.num_tokens - 1) // block_size:
            return self._underway.get(sequence.block_hashes[index])
        if sequence.prompt_logprobs is None and index < _num_common(sequence) // block_size:
            return next(iter(self._others(sequence)), None)
        return None

    def _looks_up(self, sequence: Sequence) -> bool:
        return self._prefix_caching and sequence.reads_prefix_cache

    def _others(self, sequence: Sequence) -> list[Sequence]:
        return self._choices.get(sequence.request_id, [])

    # -- while it runs -------------------------------------------------------------------------

    def begin(self, sequence: Sequence, found: PrefixMatch) -> tuple[int, int] | None:
        """It holds what was found; returns which block has to be copied into which, if any."""
        self._pool.share(found.blocks)
        sequence.block_table += found.blocks
        sequence.num_registered_blocks = len(found.blocks)
        sequence.num_computed_tokens = sequence.num_sound_tokens = found.num_tokens
        self._count(sequence)
        self._announce(sequence)
        if found.tail is None:
            return None
        (own,) = self._pool.allocate(1)
        sequence.block_table.append(own)
        return found.tail, own

    def sampled(self, sequence: Sequence) -> None:
        """A token has been sampled behind all that it has computed."""
        sequence.num_sound_tokens = sequence.num_computed_tokens
        if self._prefix_caching:
            num_full = sequence.num_computed_tokens // self._pool.block_size
            if num_full > sequence.num_registered_blocks:
                self._register(sequence, num_full)

    def end(self, sequence: Sequence) -> None:
        """It runs no more, and holds nothing."""
        for block_hash in sequence.block_hashes[sequence.num_registered_blocks :]:
            self._withdraw(block_hash, sequence)
        if sequence.request.sampling.n > 1:
            choices = self._choices[sequence.request_id]
            choices.remove(sequence)
            if not choices:
                del self._choices[sequence.request_id]
        if sequence.num_sound_tokens < sequence.num_computed_tokens:
            first = sequence.num_sound_tokens // self._pool.block_size
            self._unsound += sequence.block_table[first:]
        self._pool.release(reversed(sequence.block_table))
        sequence.block_table.clear()
        sequence.num_computed_tokens = sequence.num_sound_tokens = 0

    def take_unsound(self) -> list[int]:
        """Blocks of sequences that ended, or lost them, before a token was sampled behind what they
        hold: to be overwritten before the next run, for whoever gets them masks it, and a number
        that is none would come through."""
        unsound, self._unsound = self._unsound, []
        return unsound

    def _count(self, sequence: Sequence) -> None:
        if sequence.num_cached_tokens is not None:
            return
        num_found = sequence.num_computed_tokens if self._prefix_caching else 0
        sequence.num_cached_tokens = min(num_found, sequence.num_prompt_tokens)
        if self._prefix_caching:
            self.query_tokens += sequence.num_tokens
            self.hit_tokens += num_found

    def _announce(self, sequence: Sequence) -> None:
        """Tell what it computes from now on until it samples."""
        if sequence.request.sampling.n > 1:
            self._choices.setdefault(sequence.request_id, []).append(sequence)
        if self._prefix_caching:
            block_size = self._pool.block_size
            hashes = block_hashes(sequence, sequence.num_tokens // block_size, block_size)
            for block_hash in hashes[sequence.num_registered_blocks :]:
                self._underway.setdefault(block_hash, sequence)

    def _withdraw(self, block_hash: str, sequence: Sequence) -> None:
        if self._underway.get(block_hash) is sequence:
            del self._underway[block_hash]

    def _register(self, sequence: Sequence, num_full: int) -> None:
        hashes = block_hashes(sequence, num_full, self._pool.block_size)
        new = []
        for index in range(sequence.num_registered_blocks, num_full):
            self._withdraw(hashes[index], sequence)
            if self._pool.register(sequence.block_table[index], hashes[index]):
                new.append(index)
        sequence.num_registered_blocks = num_full
        if self._pool.events is not None:
            for first, stop in _runs(new):
                self._tell(self._pool.events, sequence, first, stop)

    def _tell(self, events: KVEvents, sequence: Sequence, first: int, stop: int) -> None:
        block_size, hashes = self._pool.block_size, sequence.block_hashes
        events.stored(
            hashes[first:stop],
            hashes[first - 1] if first else None,
            sequence.token_ids[first * block_size : stop * block_size],
            [extra_keys(sequence, index, block_size) for index in range(first, stop)],
            sequence.request.adapter,
        )


def _num_common(sequence: Sequence) -> int:
    """Tokens that all choices of its request begin with, but for its last one."""
    return min(sequence.num_prompt_tokens, sequence.num_tokens - 1)


def _runs(indexes: list[int]) -> Iterator[tuple[int, int]]:
    """[first, stop) of each run of consecutive ones."""
    for _, run in groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        yield members[0], members[-1] + 1
