"""Rules of the batch lane: which of its sequences may start in a step, and their tokens. Pure.

A step with interactive sequences takes at most `slowdown` times as long as it would take without
the batch lane, by the measured time of a step. The difference is the allowance of the batch lane in
this step. Decodes of the batch lane use it first, then its prompts and items. A step in which an
interactive prompt begins has nothing of the batch lane: the prompt fills the step, so other tokens
would have their full price, at the expense of a first token. It has the work for which the batch
lane has saved enough, because places may only become free in such steps.

Some work is indivisible: one decode, the encoding of an item, and on a GPU any tokens of a prompt
next to decodes. While such work exceeds the allowance, the batch lane saves what is left of the
allowance of each step, and the work is done once it is paid for. So this step takes longer, but the
slowdown holds for all steps with interactive sequences together, and the batch lane does not
starve.

Between interactive sequences, an interactive request may have to wait for the end of a step. So
while one is expected, a step takes at most the allowance of a typical first step of an interactive
request, or a few steps of one token, because shorter steps would lose throughput. If none is
expected, a step still takes only `MAX_LEAST_STEPS` times as long as a step of one token.
"""

import math
from collections import deque
from statistics import median

from workers.engine.core.sequence import Sequence
from workers.engine.core.step_cost import MIN_CHUNK, NUM_TIMES, StepCost, StepWork

DELAY_S = 30.0
"""Time of steps by which an interactive sequence may arrive later than a batch sequence and still
come before it."""
EXPECTED_S = 30.0
"""Time of steps since the last one with interactive sequences after which none are expected."""
MAX_LEAST_STEPS = 20
"""Longest step of the batch lane, in steps of one token. The time of such a step passes in every
step, for example to read the weights: so at most 5 % of the throughput are lost."""
LEAST_EXTRA_STEPS = 4
"""The same while an interactive request is expected, for a slowdown of 2: a step of the batch lane
may then take 5 steps of one token, and 2 for a slowdown of 1.25."""
NOTHING = StepWork()


class BatchLane:
    """Limits on the sequences of the batch lane in each step."""

    def __init__(self, cost: StepCost, slowdown: float) -> None:
        self._cost = cost
        self._slowdown = slowdown
        self._clock_s = 0.0
        """Time of all steps so far."""
        self._last_interactive_s = -math.inf
        self._first_steps_s: deque[float] = deque(maxlen=NUM_TIMES)
        """Times of the last steps with interactive prompts, without the batch lane."""
        self._saved_s = 0.0
        """Unused allowance of earlier steps; less than 0 if they exceeded their allowance."""
        self._interactive = NOTHING
        """Work of interactive sequences in this step."""
        self._num_decodes = self._num_prompt_tokens = self._num_batch_tokens = 0
        """Tokens of both lanes by kind, and of the batch lane, in this step."""
        self._has_items = False
        self._items_s = 0.0
        """Time of the batch lane's items in this step."""
        self._limit_s = math.inf
        """Time that this step may take."""
        self._is_closed = False
        """Whether the batch lane has no part in this step."""
        self._unpaid_s = 0.0
        """Time by which the next indivisible work exceeds the limit. It stays through steps in
        which no batch sequence may have tokens, because the budget or the places are used up."""
        self._has_candidates = False
        """Whether a batch sequence may have tokens in this step."""
        self._awaits_item = False
        """Whether a sequence cannot continue without an item that would exceed the limit."""

    def observe(self, seconds: float) -> None:
        """Add the time of a step that has run."""
        self._clock_s += seconds

    def turn_s(self, sequence: Sequence) -> float:
        """Return the priority of a sequence that arrives now; lower values come first."""
        return self._clock_s + (DELAY_S if sequence.is_batch else 0.0)

    # -- one step ---------------------------------------------------------------------------

    @property
    def has_interactive(self) -> bool:
        """Whether this step is for interactive sequences."""
        return self._interactive.num_tokens > 0

    def begin_step(self, interactive: StepWork) -> None:
        """Set the limits of a step with this work of interactive sequences."""
        had_prompts = self._interactive.num_prompt_tokens > 0
        self._interactive = interactive
        self._num_decodes = interactive.num_decodes
        self._num_prompt_tokens = interactive.num_prompt_tokens
        self._num_batch_tokens = 0
        self._items_s = 0.0
        self._has_items = self._awaits_item = self._is_closed = self._has_candidates = False
        if not self.has_interactive:
            self.begin_alone()
            return
        self._last_interactive_s = self._clock_s
        self._limit_s = math.inf
        if self._cost.is_known:
            alone_s = self._step_s()
            self._limit_s = self._slowdown * alone_s + min(0.0, self._saved_s)
            if interactive.num_prompt_tokens:
                self._first_steps_s.append(alone_s)
                is_paid = 0 < self._unpaid_s <= self._saved_s
                self._is_closed = not had_prompts and not is_paid

    def begin_alone(self) -> None:
        """Set the limits of a step without interactive sequences, which may have been planned."""
        self._num_decodes -= self._interactive.num_decodes
        self._num_prompt_tokens -= self._interactive.num_prompt_tokens
        self._interactive = NOTHING
        self._saved_s = self._unpaid_s = 0.0
        self._awaits_item = self._is_closed = False
        self._limit_s = math.inf
        if not self._cost.is_known:
            return
        self._limit_s = MAX_LEAST_STEPS * self._cost.least_s
        if self._first_steps_s and self._clock_s - self._last_interactive_s < EXPECTED_S:
            extra = self._slowdown - 1
            useful_s = (1 + LEAST_EXTRA_STEPS * extra) * self._cost.least_s
            self._limit_s = min(self._limit_s, max(extra * median(self._first_steps_s), useful_s))

    def end_step(self) -> None:
        """Save the rest of the allowance, if it was too small for indivisible work."""
        if self.has_interactive and self._cost.is_known and not self._is_closed:
            left_s = self._limit_s + max(0.0, self._saved_s) - self._step_s()
            # A little more than needed, because the estimates change.
            self._saved_s = min(left_s, 1.1 * self._unpaid_s)

    def may_start(self, sequence: Sequence, num_cached: int = 0) -> bool:
        """Return whether a waiting batch sequence may have tokens in this step.

        `num_cached` tokens of the sequence need not be computed.
        """
        return self.tokens_left(sequence, num_cached) > 0

    def tokens_left(self, sequence: Sequence, num_cached: int = 0) -> int:
        """Return the limit on new tokens of a batch sequence in this step.

        Once a sequence cannot continue because of an item, no later one may begin an item, or use
        the allowance for a prompt.
        """
        num_tokens = sequence.num_uncomputed_tokens - num_cached
        if math.isinf(self._limit_s):
            return num_tokens
        if not self._has_candidates:
            self._has_candidates, self._unpaid_s = True, 0.0
        # A step without the batch lane also records the time of the work that waits.
        num_left = self._num_fitting(num_tokens, sequence.items_ahead(num_cached))
        return 0 if self._is_closed else num_left

    def _num_fitting(self, num_tokens: int, items: list[tuple[int, int]]) -> int:
        """Return how many of the tokens of a sequence with these items fit."""
        if self._awaits_item and (items or (num_tokens > 1 and self.has_interactive)):
            return 0
        if not items:
            return self._fitting_tokens(num_tokens, self._limit_s)
        num_left = self._fitting_with_items(num_tokens, items)
        self._awaits_item |= num_left == 0 and items[0][0] == 0
        return num_left

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the next tokens of a batch sequence, and the items that they begin."""
        self._count(sequence, num_tokens)
        for start, length in sequence.items_ahead():
            if start < num_tokens:
                self._has_items = True
                self._items_s += self._cost.item_seconds(length)

    def remove(self, sequence: Sequence, num_tokens: int) -> None:
        """Return the tokens of a sequence that is no longer in this step."""
        self._count(sequence, -num_tokens)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        self._num_batch_tokens += num_tokens
        if sequence.num_uncomputed_tokens > 1:
            self._num_prompt_tokens += num_tokens
        else:
            self._num_decodes += num_tokens

    def _step_s(self, more: StepWork = NOTHING) -> float:
        """Return the time of this step with more work."""
        num_decodes = self._num_decodes + more.num_decodes
        num_prompt_tokens = self._num_prompt_tokens + more.num_prompt_tokens
        return self._cost.seconds(num_decodes, num_prompt_tokens) + self._items_s

    def _fitting_tokens(self, num_tokens: int, limit_s: float) -> int:
        """Return how many of the tokens fit. One token is a decode, and more are of a prompt."""
        is_prompt = num_tokens > 1
        num_left = self._max_more(limit_s, is_prompt)
        if not self.has_interactive:
            return max(num_left, MIN_CHUNK - self._num_batch_tokens, 0)
        if num_left > 0:
            return num_left
        unit = 1
        if is_prompt and self._num_prompt_tokens == 0:
            # More tokens share the time that any prompt takes.
            begun_s = self._step_s(StepWork(0, 1))
            unit = max(1, self._max_more(2 * begun_s - self._step_s(), is_prompt))
        unpaid_s = self._step_s(StepWork(0, unit) if is_prompt else StepWork(1)) - limit_s
        # Also if it is paid for: the work may have to wait for a place or for blocks.
        self._unpaid_s = max(self._unpaid_s, unpaid_s)
        if unpaid_s <= self._saved_s:
            return max(unit, self._max_more(limit_s + self._saved_s, is_prompt))
        return 0

    def _max_more(self, limit_s: float, is_prompt: bool) -> int:
        """Return the number of tokens of a kind that this step may have in addition."""
        left_s = limit_s - self._items_s
        if is_prompt:
            return self._cost.max_prompt_tokens(left_s, self._num_decodes) - self._num_prompt_tokens
        return self._cost.max_decodes(left_s, self._num_prompt_tokens) - self._num_decodes

    def _fitting_with_items(self, num_tokens: int, items: list[tuple[int, int]]) -> int:
        """Return the number of tokens that fit together with the items that they begin.

        A step without interactive sequences always has room for one item.
        """
        left_s = self._limit_s + max(0.0, self._saved_s) - self._step_s()
        is_free = not self.has_interactive and not self._has_items
        items_s, stop = 0.0, num_tokens
        for start, length in items:
            item_s = self._cost.item_seconds(length)
            if items_s + item_s > left_s and not is_free:
                missing_s = items_s + item_s - left_s + max(0.0, self._saved_s)
                self._unpaid_s = max(self._unpaid_s, missing_s)
                stop = start
                break
            items_s += item_s
            is_free = False
        before = min(items[0][0], self._fitting_tokens(num_tokens, self._limit_s))
        return min(stop, max(before, self._fitting_tokens(num_tokens, self._limit_s - items_s)))
