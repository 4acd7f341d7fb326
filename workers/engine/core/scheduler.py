"""Scheduler: selects the sequences of each step, their numbers of tokens and their KV blocks.

It computes nothing on tensors. A sequence gets its priority when it arrives: the time of all steps
so far, plus the delay of its lane. Interactive sequences thus overtake batch sequences that arrived
up to `batch_lane.DELAY_S` earlier, and no others. Sequences are admitted and get their share of the
token budget in order of priority; the running sequence with the lowest one is preempted first.

No sequence starves. Only finitely many sequences can ever have a better priority, because it
derives from the time of steps and not from other requests. The sequence with the best priority
makes progress at every step, or, in the batch lane, after each few steps that pay for it; or it
waits for blocks while no other sequence is admitted and the first running sequence makes progress,
until enough of them have finished. Two bounds ensure this
progress: the pool can hold a sequence of `max_model_len` tokens, and no more sequences run than the
budget has tokens, so that decodes leave at least one token for it. A sequence that needs prompt
logits may also wait for running sequences that need them; no later one that needs prompt logits is
started before it.

`batch_lane` limits the batch sequences of a step. A batch sequence also gives up its place for a
waiting interactive sequence with a better priority.

A running sequence may wait for input: the row of its next token depends on a text that another
worker has not written yet, or on an item that the tower thread has not encoded yet. It keeps its
place and its blocks, and steps skip it. It is preempted like any other sequence, and also for any
waiting sequence with a better priority. Waiting sequences with a lower priority wait until it
continues.
"""

from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager

from workers.engine.core.batch_lane import BatchLane
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.memory_shortage import MemoryShortage
from workers.engine.core.prefix_cache import PrefixCache, PrefixMatch
from workers.engine.core.sequence import Batch, ScheduledSequence, Sequence, Status
from workers.engine.core.step_budget import StepBudget
from workers.engine.core.step_cost import UNLIMITED, PrefillLimit, StepCost, StepWork


class Scheduler:
    """Assigns tokens and blocks to sequences, with chunked prefill and preemption."""

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
        max_drafting_tokens: int = 0,
        prefill_limit: PrefillLimit = UNLIMITED,
        interactive_slowdown: float = 1.25,
        keeps_states: bool = False,
    ) -> None:
        """`max_drafting_tokens` is the total number of tokens up to which a step gets drafts. For
        `interactive_slowdown` see `BatchLane`, for `keeps_states` see `EngineCore`."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_drafting_tokens = max_drafting_tokens
        self.prefill_limit = prefill_limit
        self.prefix_cache = PrefixCache(
            pool, prefix_caching and not keeps_states, shares_prompts=not keeps_states
        )
        self.step_cost = StepCost()
        self.shortage = MemoryShortage()
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_slots = 0
        """KV slots in held blocks, summed over all steps."""
        self.num_unused_slots = 0
        """KV slots in held blocks that held no token, summed over all steps."""
        self._pool = pool
        self._most_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._free_slots = list(range(self._max_num_seqs))
        """Slots for the states of sequences; running sequences have the others."""
        assert self._most_seqs >= 1
        assert pool.num_blocks * pool.block_size >= max_model_len
        self._num_added = 0
        self._lane = BatchLane(self.step_cost, interactive_slowdown)
        # Both are sorted by priority.
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._can_admit = True
        """False while steps admit no sequence: none can be admitted before the state changes."""
        self._is_ahead = False
        """Whether the tokens of a step are awaited."""

    @property
    def _max_num_seqs(self) -> int:
        return self.shortage.limit_seqs(self._most_seqs)

    @property
    def running(self) -> list[Sequence]:
        """Running sequences in order of priority."""
        return self._running

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences in order of priority."""
        return self._waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_batch(self) -> int:
        return sum(sequence.is_batch for sequence in self._waiting)

    @property
    def num_without_input(self) -> int:
        """Running sequences that wait for input."""
        may_wait = [s for s in self._running if s.speech is not None or s.awaited_items]
        return sum([sequence.waits_for_input for sequence in may_wait])

    @property
    def has_work(self) -> bool:
        """Whether a step can make progress. False if all sequences wait for input, or for such
        sequences."""
        if self._waiting and self._can_admit:
            return True
        return any(sequence.num_computable_tokens for sequence in self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence with the priority of its lane."""
        self._can_admit = True
        self._num_added += 1
        sequence.priority = (self._lane.turn_s(sequence), self._num_added)
        insort(self._waiting, sequence, key=_priority)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence and release its blocks."""
        self._can_admit = True
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED

    @property
    def can_look_ahead(self) -> bool:
        """Whether a step can be scheduled before the tokens of the step before it are known.

        Drafts and the rows of a talker depend on the last token. There are no drafts if as many
        sequences run as the limit on drafting allows tokens.
        """
        may_draft = len(self._running) < self.max_drafting_tokens
        for sequence in self._running:
            if sequence.speech is not None or (may_draft and sequence.drafter is not None):
                return False
        return True

    @contextmanager
    def looking_ahead(self, batch: Batch) -> Iterator[None]:
        """Schedule the step after a step in flight, as if the tokens of `batch` were computed.

        Tokens that are sampled are awaited; see `Sequence.token_ids`. A sequence that ends with its
        awaited token is not scheduled. Afterwards all counts are those before the step in flight,
        but blocks stay allocated, and sequences may have been admitted or preempted.
        """
        num_awaited = 0
        for s in batch.scheduled:
            sequence = s.sequence
            sequence.num_computed_tokens = s.end
            if s.samples_token:
                num_awaited += 1
                # The prompt and all tokens of the answer end at `s.end`.
                if s.end + 1 < sequence.num_prompt_tokens + sequence.max_tokens:
                    sequence.token_ids.append(-num_awaited)
        self._is_ahead = True
        try:
            yield
        finally:
            self._is_ahead = False
            for s in batch.scheduled:
                if s.sequence.token_ids[-1] < 0:
                    s.sequence.token_ids.pop()
                if s.sequence.status is Status.RUNNING:
                    s.sequence.num_computed_tokens = s.start

    def drop(self, batch: Batch, *, preempt_last: bool = False) -> None:
        """Let the sequences of a batch be scheduled again, because it was not computed.

        With `preempt_last`, the sequence of the lowest priority returns to the queue, as do
        sequences that begin with the copy of a block.
        """
        running = [s for s in batch.scheduled if s.sequence.status is Status.RUNNING]
        last = max(running, key=lambda s: s.sequence.priority) if preempt_last else None
        for s in running:
            if s is last or s.copy is not None:
                self.num_preemptions += 1
                self._requeue(s.sequence)

    def schedule(self) -> Batch:
        """Return the batch of the next step.

        Decodes are scheduled first. Prefills use the rest of the budget, in chunks, as far as the
        prefill limit lets them.
        """
        num_preemptions = self.num_preemptions
        self._lane.begin_step(self._interactive_work())
        step = StepBudget(self.max_num_batched_tokens, self._lane)
        # A copy, because preemption removes sequences from the list.
        running = self._running[:]
        prefills = []
        for sequence in running:
            num_left = len(sequence.token_ids) - sequence.num_computed_tokens
            # A last token that begins an item is scheduled with the prefills.
            if num_left > 1 or (sequence.request.items and sequence.begins_item):
                prefills.append(sequence)
            elif sequence.status is Status.RUNNING:
                self._schedule_tokens(sequence, step)
        num_decoding = self.max_num_batched_tokens - step.budget
        limit = self.prefill_limit.max_tokens(self.step_cost, num_decoding)
        limit = step.budget if limit is None else min(step.budget, limit)
        step.prompt_tokens = self.shortage.limit_prompt_tokens(limit)
        self._schedule_prefills(prefills, step, num_preemptions)
        if self._lane.has_interactive and not step.has_interactive:
            # An interactive sequence may wait for a prefix of the batch lane.
            self._lane.begin_alone()
            left = [s for s in self._running if s not in step.scheduled]
            self._schedule_prefills(left, step, num_preemptions)
        # If all running sequences wait for input, the next step could not admit any either.
        self._can_admit = bool(step.scheduled) or not running or self._running != running
        self._lane.end_step()
        if not self._is_ahead and not self.shortage.is_present:
            self._add_drafts(step)
        return Batch(list(step.scheduled.values()))

    def _schedule_prefills(
        self, prefills: list[Sequence], step: StepBudget, num_preemptions: int
    ) -> None:
        """Schedule chunks of running sequences, and admit others if none had to be preempted."""
        for sequence in prefills:
            if sequence.status is Status.RUNNING:
                self._schedule_tokens(sequence, step)
        # After a preemption blocks are short: a sequence admitted now would be preempted next.
        if self._waiting and self.num_preemptions == num_preemptions:
            self._admit_waiting(step)

    def _interactive_work(self) -> StepWork:
        """Return the work of interactive sequences that the next step is likely to have."""
        lengths = [
            len(s.token_ids) - s.num_computed_tokens
            if s.speech is None and not s.awaited_items
            else s.num_computable_tokens
            for s in self._running
            if not s.is_batch
        ]
        num_places = self._max_num_seqs - len(lengths)
        # An interactive sequence also gets the places and blocks of batch sequences.
        held = [len(s.block_table) for s in self._running if s.is_batch]
        num_free = self._pool.num_free + sum(held)
        for sequence in (s for s in self._waiting if not s.is_batch):
            num_places -= 1
            if num_places < 0 or sum(lengths) >= self.max_num_batched_tokens:
                break
            match = self.prefix_cache.match_prefix(sequence)
            num_free -= self._num_blocks(sequence.num_tokens) - len(match.blocks)
            if num_free < 0:
                break
            if not self.prefix_cache.is_being_computed(sequence, match):
                lengths.append(max(0, sequence.num_computable_tokens - match.num_tokens))
        num_decodes = lengths.count(1)
        num_prompt_tokens = min(sum(lengths), self.max_num_batched_tokens) - num_decodes
        limit = self.prefill_limit.max_tokens(self.step_cost, num_decodes)
        if limit is not None:
            num_prompt_tokens = min(num_prompt_tokens, limit)
        return StepWork(num_decodes, num_prompt_tokens)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Measured speed of whole steps of prompt tokens; 0 before the first step."""
        if not self.step_cost.is_known:
            return 0.0
        num_tokens = self.max_num_batched_tokens
        return num_tokens / self.step_cost.seconds(0, num_tokens)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record the time of the last step. The limits of later steps are derived from it."""
        self.step_cost.observe(work, seconds)
        self.shortage.end_step(seconds)
        self._lane.observe(seconds)

    def update_after_step(self, batch: Batch) -> None:
        """Update computed tokens and blocks after the model has run.

        The sampled tokens must already be in the sequences' `token_ids`. Sequences that the next
        step has preempted have no blocks.
        """
        for s in batch.scheduled:
            sequence = s.sequence
            if sequence.status is not Status.RUNNING:
                continue
            if s.draft_token_ids:
                self._resolve_drafts(s)
            sequence.num_computed_tokens = s.end
            if s.draft_token_ids or not s.samples_token:
                # Rejected drafts do not count, nor does the last token of a prompt.
                sequence.num_computed_tokens = min(s.end, sequence.num_tokens - 1)
            if s.samples:
                if sequence.num_launched_tokens == s.end:
                    sequence.num_launched_tokens = sequence.num_computed_tokens
                self.prefix_cache.on_sampled(sequence)
        self._count_kv_slots()

    def _resolve_drafts(self, s: ScheduledSequence) -> None:
        """Count accepted drafts and release the blocks that only rejected drafts needed."""
        num_drafts, sequence = len(s.draft_token_ids), s.sequence
        # Two of the uncomputed tokens are not drafts: the token before them and the sampled token.
        num_accepted = sequence.num_uncomputed_tokens - 2
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        if sequence.drafter is not None:
            sequence.drafter.record_result(num_drafts, num_accepted)
        num_blocks = self._num_blocks(sequence.num_tokens - 1)
        sequence.peak_blocks = max(sequence.peak_blocks, len(sequence.block_table))
        self._pool.release(sequence.block_table[num_blocks:])
        del sequence.block_table[num_blocks:]

    def _count_kv_slots(self) -> None:
        """Count held and unused KV slots; only a block with one owner has unused ones."""
        self.num_slots += self._pool.block_size * (self._pool.num_blocks - self._pool.num_free)
        num_blocks = sum(map(len, [sequence.block_table for sequence in self._running]))
        num_tokens = sum([sequence.num_computed_tokens for sequence in self._running])
        self.num_unused_slots += num_blocks * self._pool.block_size - num_tokens

    def _admit_waiting(self, step: StepBudget) -> None:
        """Admit waiting sequences in order of priority.

        A sequence that lacks blocks stops the admission of all later sequences. A sequence is
        skipped while its prefix is being computed, or two requests with the same prefix would keep
        all others out of a step; its slot and blocks stay reserved. It waits only for sequences
        with a better priority, or for blocks that are restored before each step, so it is not
        skipped forever. A sequence is passed over if no prompt logits or tokens of its lane are
        left, and nothing is reserved for it: any number of them may wait for a long prompt. While
        it waits to encode an item, no later batch sequence with items is started, because that
        sequence would take the item of the next step.
        """
        num_skipped = reserved_blocks = 0
        passed_over: set[str] = set()
        for sequence in self._waiting[:]:
            if min(step.budget, step.prompt_tokens) <= 0:
                return
            if not step.can_start(sequence) or sequence.request_id in passed_over:
                # Later choices wait for the first one, whose log probabilities are logged first.
                passed_over.add(sequence.request_id)
                continue
            is_full = len(self._running) + num_skipped >= self._max_num_seqs
            if is_full and not self._preempt_for(sequence, step):
                return
            match = self.prefix_cache.match_prefix(sequence)
            if not step.can_start(sequence, match.num_tokens):
                # An item comes next. A start without tokens would lose the copy of a block.
                passed_over.add(sequence.request_id)
                continue
            # All present tokens must fit: a first chunk alone might be preempted and lost.
            num_missing = self._num_blocks(sequence.num_tokens) - len(match.blocks)
            num_needed = reserved_blocks + num_missing
            while not self._pool.can_allocate(num_needed, also_held=match.blocks):
                if not self._preempt_for(sequence, step):
                    return
            if self.prefix_cache.is_being_computed(sequence, match):
                num_skipped += 1
                reserved_blocks += num_missing
            else:
                self._start(sequence, match, step)

    def _start(self, sequence: Sequence, match: PrefixMatch, step: StepBudget) -> None:
        self._waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.state_slot = self._free_slots.pop()
        insort(self._running, sequence, key=_priority)
        copy = self.prefix_cache.start(sequence, match)
        self._schedule_tokens(sequence, step, copy)

    def _schedule_tokens(
        self, sequence: Sequence, step: StepBudget, copy: tuple[int, int] | None = None
    ) -> None:
        """Allocate blocks for the next tokens, preempting the last sequence until enough are free.

        The preempted sequence may be this one, which is then not scheduled.
        """
        num_left = len(sequence.token_ids) - sequence.num_computed_tokens
        is_limited = sequence.is_batch or sequence.prompt_logprobs is not None
        may_wait = sequence.speech is not None or sequence.awaited_items
        if num_left > 1 or is_limited or may_wait:
            num_new_tokens = min(sequence.num_computable_tokens, step.max_new_tokens(sequence))
        else:
            num_new_tokens = num_left if step.budget > 0 else 0
        if num_new_tokens == 0:
            return
        num_slots = len(sequence.block_table) * self._pool.block_size
        end = sequence.num_computed_tokens + num_new_tokens
        if end > num_slots:
            num_missing = self._num_blocks(end - num_slots)
            while not self._pool.can_allocate(num_missing):
                last = self._running[-1]
                self._preempt(last, step)
                if last is sequence:
                    return
            sequence.block_table += self._pool.allocate(num_missing)
        samples = num_new_tokens == num_left
        step.add(ScheduledSequence(sequence, num_new_tokens, samples, copy))

    def _add_drafts(self, step: StepBudget) -> None:
        """Add drafts to decodes from the remaining budget and the free blocks, in equal shares.

        Shares are equal because later drafts of a sequence are less likely to be accepted.
        """
        decodes = [s for s in step.scheduled.values() if s.samples and s.num_new_tokens == 1]
        num_scheduled = self.max_num_batched_tokens - step.budget
        budget = min(step.budget, self.max_drafting_tokens - num_scheduled)
        if budget <= 0:
            return
        for num_left, s in zip(range(len(decodes), 0, -1), decodes, strict=True):
            sequence = s.sequence
            if sequence.drafter is None:
                continue
            num_slots = self._pool.block_size * (len(sequence.block_table) + self._pool.num_free)
            max_drafts = min(
                -(-budget // num_left),
                num_slots - sequence.num_tokens,
                # One more token is sampled after the drafts.
                sequence.max_tokens - sequence.num_output_tokens - 1,
            )
            if max_drafts <= 0:
                continue
            draft_token_ids = sequence.drafter.propose(sequence.token_ids, max_drafts)
            num_tokens = sequence.num_tokens + len(draft_token_ids)
            num_missing = self._num_blocks(num_tokens) - len(sequence.block_table)
            sequence.block_table += self._pool.allocate(num_missing)
            step.add_drafts(sequence, draft_token_ids)
            budget -= len(draft_token_ids)

    def _preempt_for(self, candidate: Sequence, step: StepBudget) -> bool:
        """Preempt a sequence of lower priority than the candidate; return whether there was one.

        Sequences that wait for input can be preempted, and batch sequences if the candidate is
        interactive.
        """
        for sequence in reversed(self._running):
            if sequence.priority < candidate.priority:
                return False
            is_slower = sequence.is_batch and not candidate.is_batch
            if is_slower or sequence.waits_for_input:
                self._preempt(sequence, step)
                return True
        return False

    def _preempt(self, sequence: Sequence, step: StepBudget) -> None:
        """Return a running sequence to the queue; its tokens are computed again later."""
        self.num_preemptions += 1
        self._requeue(sequence)
        step.remove_sequence(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=_priority)

    def _stop(self, sequence: Sequence) -> None:
        """Release what a running sequence holds."""
        self._running.remove(sequence)
        self._free_slots.append(sequence.state_slot)
        self.prefix_cache.free(sequence)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


def _priority(sequence: Sequence) -> tuple[float, int]:
    return sequence.priority
