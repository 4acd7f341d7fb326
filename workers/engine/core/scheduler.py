"""Who runs in the next step, with how many tokens and in which blocks; integers only.

Sequences have an order, which is settled when they arrive: by the step at which they do, and for
one of a lane with PATIENCE as if it had arrived so many steps later. So those of the faster lane go
first, but only if they come within these steps; and what has waited for longer is before all that
comes. The order decides who is admitted, who has the budget first, and who is preempted: the last
of those that run.

Nobody starves. Before any sequence there are only finitely many, for turns come from the count of
steps and not from what others ask. The first of all makes progress at every step, or waits while
nobody else is admitted and the first of those that run makes progress, one after another until it
fits. Two things keep the first going: the pool holds one of `max_model_len`, and no more run than
the budget has tokens, so that decodes leave it one.
"""

from bisect import insort
from dataclasses import dataclass, field, replace

from workers.engine.core.block_pool import BlockPool
from workers.engine.core.prefix_cache import PrefixCache, PrefixMatch
from workers.engine.core.sequence import Batch, ScheduledSequence, Sequence, Status

PATIENCE = {"interactive": 0, "batch": 1000}
"""Steps, by lane: half a minute on a CPU that is busy, a few seconds on a GPU."""
MAX_PROMPT_LOGITS = 256
"""Tokens of a step whose logits are asked for beside those that are sampled; a row of 152,000 in
float32 has 0.6 MB, and takes a millisecond to look at."""


@dataclass(slots=True)
class _Step:
    """What has been decided of a step so far."""

    budget: int
    taken: dict[Sequence, ScheduledSequence] = field(default_factory=dict)

    def room_for(self, sequence: Sequence) -> int:
        if sequence.prompt_logprobs is None:
            return self.budget
        others = (s for s in self.taken.values() if s.sequence.prompt_logprobs is not None)
        return min(self.budget, MAX_PROMPT_LOGITS - sum(s.num_new_tokens for s in others))

    def take(self, s: ScheduledSequence) -> None:
        self.taken[s.sequence] = s
        self.budget -= s.num_new_tokens

    def give_back(self, sequence: Sequence) -> None:
        if (s := self.taken.pop(sequence, None)) is not None:
            self.budget += s.num_new_tokens

    def add_drafts(self, sequence: Sequence, draft_token_ids: list[int]) -> None:
        s = self.taken[sequence]
        num_new_tokens = s.num_new_tokens + len(draft_token_ids)
        drafts = tuple(draft_token_ids)
        self.taken[sequence] = replace(s, num_new_tokens=num_new_tokens, draft_token_ids=drafts)
        self.budget -= len(drafts)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
        max_drafting_tokens: int = 0,
    ) -> None:
        """Drafts fill a step up to `max_drafting_tokens`."""
        assert min(max_num_seqs, max_num_batched_tokens) >= 1
        assert pool.num_blocks * pool.block_size >= max_model_len
        self.sharing = PrefixCache(pool, prefix_caching)
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_slots = 0
        """In the blocks held, at each step so far."""
        self.num_unused_slots = 0
        """Those of them without a token."""
        self._pool = pool
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_drafting_tokens = max_drafting_tokens
        self._num_steps = 0
        self._num_added = 0
        # Both in order.
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_batch(self) -> int:
        return sum(sequence.request.lane == "batch" for sequence in self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._num_added += 1
        patience = PATIENCE[sequence.request.lane]
        sequence.turn = (self._num_steps + patience, self._num_added)
        insort(self._waiting, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self.sharing.end(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Batch:
        """Decodes come first: a prefill takes in chunks what they leave of the budget."""
        self._num_steps += 1
        step = _Step(self._max_num_batched_tokens)
        num_running = len(self._running)
        prefills = []
        # A copy, for whoever is preempted leaves the list.
        for sequence in self._running[:]:
            if sequence.num_uncomputed_tokens > 1:
                prefills.append(sequence)
            elif sequence.status is Status.RUNNING:
                self._take(sequence, step)
        for sequence in prefills:
            if sequence.status is Status.RUNNING:
                self._take(sequence, step)
        # Blocks are short after a preemption: whoever came in now would be the next to go.
        if self._waiting and len(self._running) == num_running:
            self._admit(step)
        self._add_drafts(step)
        return Batch(list(step.taken.values()))

    def settle(self, batch: Batch) -> None:
        """The batch has been through the model, and what was sampled is in `token_ids`."""
        for s in batch.scheduled:
            if s.draft_token_ids:
                self._settle_drafts(s)
            # What has been through it and holds; the last token has only come out of it.
            stop = s.sequence.num_computed_tokens + s.num_new_tokens
            s.sequence.num_computed_tokens = min(stop, s.sequence.num_tokens - 1)
            if s.samples:
                self.sharing.sampled(s.sequence)
        self._count_slots()

    def _settle_drafts(self, s: ScheduledSequence) -> None:
        """Blocks that only rejected ones have needed go back: they are to cost others none."""
        num_drafts, sequence = len(s.draft_token_ids), s.sequence
        # Of what is uncomputed, one token was known before and one is sampled behind the drafts.
        num_accepted = sequence.num_uncomputed_tokens - 2
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        if sequence.drafter is not None:
            sequence.drafter.learn(num_drafts, num_accepted)
        num_blocks = self._num_blocks(sequence.num_tokens - 1)
        self._pool.release(sequence.block_table[num_blocks:])
        del sequence.block_table[num_blocks:]

    def _count_slots(self) -> None:
        """What is shared is full and counts once; the rest of a table is its sequence's own."""
        self.num_slots += self._pool.block_size * (self._pool.num_blocks - self._pool.num_free)
        for sequence in self._running:
            num_slots = len(sequence.block_table) * self._pool.block_size
            self.num_unused_slots += num_slots - sequence.num_computed_tokens

    def _admit(self, step: _Step) -> None:
        """In their order. One that waits for room lets nobody pass.

        One that waits for what another is computing does, but whoever passes leaves it a slot and
        the blocks that it needs: else two requests that begin alike would keep all others out of a
        step. It waits only for sequences before it, so nothing is passed for ever.
        """
        num_passed = kept_blocks = 0
        for sequence in self._waiting[: self._max_num_seqs]:
            if step.budget == 0 or len(self._running) + num_passed == self._max_num_seqs:
                return
            found = self.sharing.find(sequence)
            # Room for all known tokens is asked for, not for a chunk that might be thrown away.
            num_missing = self._num_blocks(sequence.num_tokens) - len(found.blocks)
            if not self._pool.can_allocate(kept_blocks + num_missing, beside=found.blocks):
                return
            if self.sharing.is_underway(sequence, found):
                num_passed += 1
                kept_blocks += num_missing
            else:
                self._begin(sequence, found, step)

    def _begin(self, sequence: Sequence, found: PrefixMatch, step: _Step) -> None:
        self._waiting.remove(sequence)
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=_turn)
        copy = self.sharing.begin(sequence, found)
        self._take(sequence, step, copy)

    def _take(self, sequence: Sequence, step: _Step, copy: tuple[int, int] | None = None) -> None:
        """Blocks for its next tokens, at the cost of the last in order, which may be itself."""
        num_uncomputed = sequence.num_uncomputed_tokens
        num_new_tokens = min(num_uncomputed, step.room_for(sequence))
        if num_new_tokens == 0:
            return
        num_blocks = self._num_blocks(sequence.num_computed_tokens + num_new_tokens)
        num_missing = num_blocks - len(sequence.block_table)
        if num_missing:
            while not self._pool.can_allocate(num_missing):
                last = self._preempt_last(step)
                if last is sequence:
                    return
            sequence.block_table += self._pool.allocate(num_missing)
        step.take(
            ScheduledSequence(sequence, num_new_tokens, num_new_tokens == num_uncomputed, copy)
        )

    def _add_drafts(self, step: _Step) -> None:
        """For decodes, from what is left of the step's budget and of the pool, in equal shares:
        the further a draft is ahead, the less likely it holds."""
        decodes = [s for s in step.taken.values() if s.samples and s.num_new_tokens == 1]
        num_taken = self._max_num_batched_tokens - step.budget
        room = min(step.budget, self._max_drafting_tokens - num_taken)
        for num_left, s in zip(range(len(decodes), 0, -1), decodes, strict=True):
            sequence = s.sequence
            num_slots = self._pool.block_size * (len(sequence.block_table) + self._pool.num_free)
            most = min(
                -(-room // num_left),
                num_slots - sequence.num_tokens,
                # Behind the drafts one more token is sampled.
                sequence.max_tokens - sequence.num_output_tokens - 1,
            )
            if sequence.drafter is None or most <= 0:
                continue
            draft_token_ids = sequence.drafter.propose(sequence.token_ids, most)
            num_tokens = sequence.num_tokens + len(draft_token_ids)
            num_missing = self._num_blocks(num_tokens) - len(sequence.block_table)
            sequence.block_table += self._pool.allocate(num_missing)
            step.add_drafts(sequence, draft_token_ids)
            room -= len(draft_token_ids)

    def _preempt_last(self, step: _Step) -> Sequence:
        self.num_preemptions += 1
        sequence = self._running.pop()
        step.give_back(sequence)
        self.sharing.end(sequence)
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=_turn)
        return sequence

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn
