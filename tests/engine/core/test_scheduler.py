import random
from dataclasses import replace

import pytest

from shared.protocol.sampling import SamplingParams
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.scheduler import Scheduler
from workers.engine.core.sequence import Batch, EngineRequest, Sequence, Status
from workers.engine.core.step_budget import MAX_PROMPT_LOGITS

MAX_MODEL_LEN = 16
BLOCK_SIZE = 2


def make_sequence(
    prompt_len: int, max_tokens: int = 4, first: int = 0, lane: str = "interactive"
) -> Sequence:
    """`first` is the prompt's first token, and so its whole chain of blocks."""
    prompt = [first, *range(1, prompt_len)]
    request = EngineRequest("r", prompt, [], SamplingParams(), lane=lane)
    return Sequence(request, 0, 0, list(prompt), max_tokens)


def advance(scheduler: Scheduler, batch: Batch) -> list[Sequence]:
    """Sample a token for each sequence, update, and remove and return finished sequences."""
    sampled = [s.sequence for s in batch.scheduled if s.samples]
    for sequence in sampled:
        sequence.token_ids.append(0)
    scheduler.update_after_step(batch)
    finished = [s for s in sampled if s.num_output_tokens == s.max_tokens]
    for sequence in finished:
        scheduler.remove(sequence)
    return finished


def test_long_prompts_are_chunked_and_decodes_are_scheduled_first() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 4, MAX_MODEL_LEN)
    short, long = make_sequence(1), make_sequence(7)
    scheduler.add(short)
    scheduler.add(long)
    steps = []
    for _ in range(3):
        batch = scheduler.schedule()
        steps.append([(s.sequence is long, s.num_new_tokens, s.samples) for s in batch.scheduled])
        advance(scheduler, batch)
    assert steps == [
        [(False, 1, True), (True, 3, False)],
        [(False, 1, True), (True, 3, False)],
        [(False, 1, True), (True, 1, True)],
    ]


def test_a_span_is_computed_in_one_step() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 4, MAX_MODEL_LEN)
    sequence = make_sequence(14)
    sequence.spans = [(3, 9), (9, 10), (10, 12)]
    scheduler.add(sequence)
    steps = []
    while not sequence.num_output_tokens:
        batch = scheduler.schedule()
        steps.append([(s.num_new_tokens, s.spans) for s in batch.scheduled])
        advance(scheduler, batch)
    assert steps == [[(3, [])], [(6, [(3, 9)])], [(4, [(9, 10), (10, 12)])], [(1, [])]]


def test_a_cached_part_of_a_span_is_not_computed_again() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 4, MAX_MODEL_LEN)
    for last in (0, 1):
        sequence = make_sequence(12)
        sequence.request.prompt_token_ids[-1] = sequence.token_ids[-1] = last
        sequence.spans = [(1, 11)]
        scheduler.add(sequence)
        chunks = []
        while not sequence.num_output_tokens:
            batch = scheduler.schedule()
            chunks.append(batch.num_tokens)
            advance(scheduler, batch)
        assert chunks == ([1, 10, 1] if last == 0 else [2])
        scheduler.remove(sequence)


def test_decodes_do_not_wait_for_an_older_prefill() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 4, MAX_MODEL_LEN)
    long, short = make_sequence(9), make_sequence(1)
    scheduler.add(long)
    advance(scheduler, scheduler.schedule())
    advance(scheduler, scheduler.schedule())
    scheduler.add(short)
    advance(scheduler, scheduler.schedule())
    long.token_ids += [0] * 6
    batch = scheduler.schedule()
    assert [(s.sequence, s.num_new_tokens) for s in batch.scheduled] == [(short, 1), (long, 3)]


def test_the_last_sequence_is_preempted_and_readmitted_first() -> None:
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN)
    first, second, third = make_sequence(8), make_sequence(8, first=99), make_sequence(1)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    advance(scheduler, scheduler.schedule())
    assert [s.sequence for s in scheduler.schedule().scheduled] == [first]
    assert (second.status, second.num_computed_tokens, second.block_table) == (
        Status.WAITING,
        0,
        [],
    )
    scheduler.remove(first)
    assert [s.sequence for s in scheduler.schedule().scheduled] == [second, third]


def test_none_is_admitted_in_the_step_of_a_preemption() -> None:
    """Although there is room for it, and its priority is higher than the preempted one's."""
    pool = BlockPool(8, BLOCK_SIZE)
    scheduler = Scheduler(pool, 4, 32, MAX_MODEL_LEN)
    first, last, late = make_sequence(8), make_sequence(8, first=99, lane="batch"), make_sequence(1)
    scheduler.add(first)
    scheduler.add(last)
    advance(scheduler, scheduler.schedule())
    scheduler.add(late)
    batch = scheduler.schedule()
    assert (scheduler.num_preemptions, last.status) == (1, Status.WAITING)
    assert pool.num_free == 3
    assert [s.sequence for s in batch.scheduled] == [first]
    advance(scheduler, batch)
    assert [s.sequence for s in scheduler.schedule().scheduled] == [first, late]


# -- the prefix cache -----------------------------------------------------------------------------


def new_tokens(scheduler: Scheduler) -> dict[Sequence, int]:
    """Take the next step, and return the number of its new tokens by sequence."""
    batch = scheduler.schedule()
    advance(scheduler, batch)
    return {s.sequence: s.num_new_tokens for s in batch.scheduled}


@pytest.mark.parametrize(("prompt_len", "num_cached"), [(7, 6), (8, 6), (9, 8), (2, 0), (1, 0)])
def test_all_full_blocks_except_the_last_tokens_block_are_shared(
    prompt_len: int, num_cached: int
) -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    scheduler = Scheduler(pool, 4, 32, MAX_MODEL_LEN)
    first, second = make_sequence(prompt_len, 1), make_sequence(prompt_len, 1)
    scheduler.add(first)
    assert new_tokens(scheduler) == {first: prompt_len}
    assert pool.num_free == 32
    scheduler.add(second)
    assert new_tokens(scheduler) == {second: prompt_len - num_cached}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached)
    assert scheduler.prefix_cache.query_tokens == 2 * prompt_len
    assert scheduler.prefix_cache.hit_tokens == num_cached


def test_blocks_are_shared_while_both_run_and_the_answer_is_found_too() -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    scheduler = Scheduler(pool, 4, 32, MAX_MODEL_LEN)
    first, second = make_sequence(4, 6), make_sequence(4, 6)
    scheduler.add(first)
    for _ in range(3):
        new_tokens(scheduler)
    second.token_ids += first.token_ids[4:]  # as after a resume: 7 tokens are known
    scheduler.add(second)
    assert new_tokens(scheduler)[second] == 1
    assert second.block_table[:3] == first.block_table[:3]
    assert [pool.ref_count(block) for block in second.block_table] == [2, 2, 2, 1]
    assert second.num_cached_tokens == 4, "of the prompt"


def test_without_the_cache_nothing_is_found() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN, prefix_caching=False)
    for sequence in (make_sequence(7, 1), make_sequence(7, 1)):
        scheduler.add(sequence)
        assert new_tokens(scheduler) == {sequence: 7}
        assert sequence.num_cached_tokens == 0
        assert sequence.block_hashes == [], "nothing is hashed either"
    assert scheduler.prefix_cache.query_tokens == 0


def test_blocks_are_cached_only_after_a_later_sample() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 6, MAX_MODEL_LEN)
    first, second = make_sequence(9), make_sequence(9)
    scheduler.add(first)
    assert new_tokens(scheduler) == {first: 6}
    # Its blocks are written but not verified yet.
    scheduler.add(second)
    scheduler.remove(first)
    assert new_tokens(scheduler) == {second: 6}


# -- prefixes being computed ----------------------------------------------------------------------


def test_a_common_prefix_is_computed_once() -> None:
    pool = BlockPool(128, BLOCK_SIZE)
    scheduler = Scheduler(pool, 16, 64, MAX_MODEL_LEN)
    alike = [make_sequence(10) for _ in range(16)]
    for i, sequence in enumerate(alike):
        sequence.token_ids[8:] = [50 + i, 51 + i]
        scheduler.add(sequence)
    assert new_tokens(scheduler) == {alike[0]: 10}
    assert new_tokens(scheduler) == {alike[0]: 1} | dict.fromkeys(alike[1:], 2)
    assert all(sequence.block_table[:4] == alike[0].block_table[:4] for sequence in alike)


def test_a_sequence_waits_for_a_shared_prefix_until_it_is_sampled() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 6, MAX_MODEL_LEN)
    first, second = make_sequence(9), make_sequence(9)
    scheduler.add(first)
    scheduler.add(second)
    assert new_tokens(scheduler) == {first: 6}
    assert new_tokens(scheduler) == {first: 3}
    assert new_tokens(scheduler) == {first: 1, second: 1}


def test_no_sequence_waits_for_a_removed_one() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 6, MAX_MODEL_LEN)
    first, second, third = make_sequence(9), make_sequence(9), make_sequence(9)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    assert new_tokens(scheduler) == {first: 6}
    scheduler.remove(first)
    assert new_tokens(scheduler) == {second: 6}
    assert new_tokens(scheduler) == {second: 3}
    assert new_tokens(scheduler) == {second: 1, third: 1}


def test_a_sequence_does_not_wait_for_less_than_a_block() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN)
    first, second = make_sequence(3), make_sequence(2)
    scheduler.add(first)
    scheduler.add(second)
    assert new_tokens(scheduler) == {first: 3, second: 2}


@pytest.mark.parametrize(("max_seqs", "num_blocks"), [(3, 16), (2, 16), (3, 13)])
def test_a_sequence_that_waits_for_a_prefix_is_skipped_if_its_blocks_stay_reserved(
    max_seqs: int, num_blocks: int
) -> None:
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), max_seqs, 32, MAX_MODEL_LEN)
    first, second, third = make_sequence(9), make_sequence(9), make_sequence(8, first=99)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    passes = {third: 8} if (max_seqs, num_blocks) == (3, 16) else {}
    assert new_tokens(scheduler) == {first: 9} | passes
    assert new_tokens(scheduler)[second] == 1


def test_no_sequence_waits_for_one_of_lower_priority() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 6, MAX_MODEL_LEN)
    later, first = make_sequence(9, lane="batch"), make_sequence(9)
    scheduler.add(later)
    assert new_tokens(scheduler) == {later: 6}
    scheduler.add(first)
    advance(scheduler, scheduler.schedule())
    assert first.status is Status.RUNNING


# -- choices of one request -----------------------------------------------------------------------


def choices_of(prompt_len: int, n: int) -> list[Sequence]:
    prompt = list(range(prompt_len))
    request = EngineRequest("r", prompt, [], SamplingParams(n=n))
    return [Sequence(request, i, 0, list(prompt), 4) for i in range(n)]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_prompt_is_computed_once_for_all_choices(prefix_caching: bool) -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    scheduler = Scheduler(pool, 8, 5, MAX_MODEL_LEN, prefix_caching)
    first, second, third = choices_of(10, 3)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    assert new_tokens(scheduler) == {first: 5}
    assert new_tokens(scheduler) == {first: 5}
    batch = scheduler.schedule()
    assert [(s.sequence, s.num_new_tokens) for s in batch.scheduled] == [
        (first, 1),
        (second, 1),
        (third, 1),
    ]
    assert first.block_table[:4] == second.block_table[:4] == third.block_table[:4]
    # Each choice writes its own block of the prompt's last token, and continues in it.
    assert batch.copies == [
        (first.block_table[4], second.block_table[4]),
        (first.block_table[4], third.block_table[4]),
    ]
    assert 32 - pool.num_free == 4 + 2 + 1 + 1


def test_nothing_is_copied_where_a_block_ends() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 8, 32, MAX_MODEL_LEN)
    first, second = choices_of(9, 2)
    scheduler.add(first)
    scheduler.add(second)
    assert new_tokens(scheduler) == {first: 9}
    batch = scheduler.schedule()
    assert {s.sequence: s.num_new_tokens for s in batch.scheduled} == {first: 1, second: 1}
    assert batch.copies == []


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_without_a_full_block_to_share_begin_together(prefix_caching: bool) -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 8, 32, MAX_MODEL_LEN, prefix_caching)
    choices = choices_of(2, 3)
    for sequence in choices:
        scheduler.add(sequence)
    assert new_tokens(scheduler) == dict.fromkeys(choices, 2)


def test_without_the_cache_a_choice_that_comes_too_late_computes_its_prompt() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 1, 32, MAX_MODEL_LEN, prefix_caching=False)
    first, second = choices_of(9, 2)
    scheduler.add(first)
    scheduler.add(second)
    assert new_tokens(scheduler) == {first: 9}
    scheduler.remove(first)
    assert new_tokens(scheduler) == {second: 9}
    assert second.num_cached_tokens == 0


# -- room -----------------------------------------------------------------------------------------


def test_shared_free_blocks_are_not_counted_twice() -> None:
    """8 blocks: 3 are held, 4 findable, 1 empty. 6 are needed, and 4 of them found."""
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN)
    gone, holder, late = make_sequence(9, 1), make_sequence(5, first=99), make_sequence(12)
    scheduler.add(gone)
    new_tokens(scheduler)
    scheduler.add(holder)
    assert new_tokens(scheduler) == {holder: 5}
    scheduler.add(late)
    assert new_tokens(scheduler) == {holder: 1}, "5 are free, but 4 of these are those found"
    scheduler.remove(holder)
    assert new_tokens(scheduler) == {late: 4}


def test_a_preempted_sequence_finds_its_remaining_blocks() -> None:
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN)
    first, second = make_sequence(8, 5), make_sequence(8, 5, first=99)
    scheduler.add(first)
    scheduler.add(second)
    assert new_tokens(scheduler) == {first: 8, second: 8}
    assert new_tokens(scheduler) == {first: 1}
    assert (second.status, second.num_tokens) == (Status.WAITING, 9)
    scheduler.remove(first)
    # One of its four blocks has been needed for the first: its last.
    assert new_tokens(scheduler) == {second: 3}
    assert second.num_cached_tokens == 0, "at first"


# -- waste ----------------------------------------------------------------------------------------


def test_slots_without_a_token_are_counted_at_each_step() -> None:
    """Two of 5 tokens share two blocks of 2, and each has half of a third."""
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN)
    for sequence in (make_sequence(5), make_sequence(5)):
        scheduler.add(sequence)
        new_tokens(scheduler)
    # First 6 slots for one with 5 tokens; then 8, 6 and 5 of which have been computed.
    assert (scheduler.num_unused_slots, scheduler.num_slots) == (1 + 1, 6 + 8)


@pytest.mark.parametrize(("block_size", "is_enough"), [(8, True), (16, False)])
def test_waste_of_many_at_once_is_under_three_per_cent(block_size: int, is_enough: bool) -> None:
    """32 with prompts of 64 to 256 tokens, 64 tokens each: why blocks are of 8 on a CPU."""
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(2**14 // block_size, block_size), 64, 2048, 1024)
    for i in range(32):
        scheduler.add(make_sequence(rng.randint(64, 256), 64, first=100 + i))
    while scheduler.has_work:
        advance(scheduler, scheduler.schedule())
    assert (scheduler.num_unused_slots < 0.03 * scheduler.num_slots) == is_enough


# -- drafts ---------------------------------------------------------------------------------------


class Eager:
    """Drafts as much as it may; nothing of it holds."""

    def __init__(self) -> None:
        self.learnt: list[tuple[int, int]] = []

    def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
        return [1] * max_drafts

    def record_result(self, num_drafts: int, num_accepted: int) -> None:
        self.learnt.append((num_drafts, num_accepted))


def drafting(prompt_len: int, first: int, max_tokens: int = 8) -> Sequence:
    sequence = make_sequence(prompt_len, max_tokens, first)
    sequence.drafter = Eager()
    return sequence


def num_drafts(scheduler: Scheduler) -> dict[Sequence, int]:
    """Take the next step, and return the number of its drafts by sequence."""
    batch = scheduler.schedule()
    advance(scheduler, batch)
    return {s.sequence: len(s.draft_token_ids) for s in batch.scheduled}


def test_drafts_share_the_remaining_budget() -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    scheduler = Scheduler(pool, 4, 12, MAX_MODEL_LEN, max_drafting_tokens=7)
    first, second, third = drafting(3, 1), drafting(3, 2), drafting(6, 3)
    scheduler.add(first)
    scheduler.add(second)
    assert num_drafts(scheduler) == {first: 0, second: 0}, "prompts come first"
    assert num_drafts(scheduler) == {first: 3, second: 2}
    assert [len(s.block_table) for s in (first, second)] == [2, 2], "what was rejected holds none"
    assert isinstance(first.drafter, Eager)
    assert first.drafter.learnt == [(3, 0)]
    assert (scheduler.num_draft_tokens, scheduler.num_accepted_tokens) == (5, 0)
    scheduler.add(third)
    assert num_drafts(scheduler) == {first: 0, second: 0, third: 0}, "eight tokens without any"
    assert num_drafts(scheduler) == {first: 2, second: 1, third: 1}


def test_drafts_take_no_budget_or_blocks_from_other_sequences() -> None:
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 4, 12, MAX_MODEL_LEN, max_drafting_tokens=99)
    first, second = drafting(5, 1), drafting(6, 2)
    scheduler.add(first)
    scheduler.add(second)
    num_drafts(scheduler)
    # Three blocks and four are held; the free one has room for two drafts of the first sequence.
    assert num_drafts(scheduler) == {first: 2, second: 1}
    assert scheduler.num_preemptions == 0
    small = Scheduler(BlockPool(8, BLOCK_SIZE), 2, 3, MAX_MODEL_LEN, max_drafting_tokens=99)
    third, long = drafting(1, 3), make_sequence(9)
    small.add(third)
    num_drafts(small)
    assert num_drafts(small) == {third: 2}, "up to the budget"
    small.add(long)
    assert num_drafts(small) == {third: 0, long: 0}, "which a prompt takes before them"
    last = drafting(1, 4, max_tokens=3)
    alone = Scheduler(BlockPool(8, BLOCK_SIZE), 2, 9, MAX_MODEL_LEN, max_drafting_tokens=99)
    alone.add(last)
    assert [num_drafts(alone)[last] for _ in range(3)] == [2, 1, 0], "none behind the end"


def test_prompt_logits_are_computed_in_small_chunks() -> None:
    """Requests for prompt logprobs share the limit of a step; others do not wait."""
    num_tokens = MAX_PROMPT_LOGITS
    scheduler = Scheduler(BlockPool(2048, BLOCK_SIZE), 4, 4 * num_tokens, 2 * num_tokens)
    first, second, plain = (make_sequence(num_tokens - 10 * (i + 1), first=i) for i in range(3))
    for sequence in (first, second, plain):
        scheduler.add(sequence)
    first.prompt_logprobs, second.prompt_logprobs = {}, {}
    assert new_tokens(scheduler) == {first: num_tokens - 10, second: 10, plain: num_tokens - 30}


def test_prompts_for_which_no_logits_are_left_hold_back_no_others() -> None:
    """Whatever their number, and although one of them begins with the same blocks."""
    max_num_seqs, num_tokens = 3, MAX_PROMPT_LOGITS - 10
    pool = BlockPool(512, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_num_seqs, 4 * num_tokens, num_tokens + 4)
    asking = [make_sequence(num_tokens, 1, first=i) for i in range(max_num_seqs + 2)]
    for i, sequence in enumerate(asking):
        sequence.request_id = f"r{i}"
        sequence.prompt_logprobs = {}
        scheduler.add(sequence)
    plain = make_sequence(num_tokens, 1, first=2)
    scheduler.add(plain)
    assert new_tokens(scheduler) == {asking[0]: num_tokens, asking[1]: 10, plain: num_tokens}
    assert [sequence.status for sequence in asking[2:]] == [Status.WAITING] * 3
    assert new_tokens(scheduler) == {asking[1]: num_tokens - 10, asking[2]: 20}
    while scheduler.has_work:
        assert new_tokens(scheduler)
    assert pool.num_free == pool.num_blocks


def test_choices_wait_for_the_one_that_has_the_prompt_logprobs() -> None:
    scheduler = Scheduler(BlockPool(512, BLOCK_SIZE), 4, 1024, 512)
    long, other = make_sequence(MAX_PROMPT_LOGITS, first=5), make_sequence(3, first=7)
    request = replace(make_sequence(1).request, request_id="n", sampling=SamplingParams(n=2))
    choices = [Sequence(request, choice, 0, [1], 1) for choice in range(2)]
    long.prompt_logprobs = choices[0].prompt_logprobs = {}
    for sequence in (long, *choices, other):
        scheduler.add(sequence)
    assert new_tokens(scheduler) == {long: MAX_PROMPT_LOGITS, other: 3}
    assert {*choices} <= {*new_tokens(scheduler)}
