import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sampling import SamplingParams
from workers.engine.blocks import BlockPool
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Batch, EngineRequest, Sequence, Status

MAX_MODEL_LEN = 16
BLOCK_SIZE = 2


def make_sequence(prompt_len: int, max_tokens: int = 4, first: int = 0) -> Sequence:
    """`first` is the prompt's first token, and so its whole chain of blocks."""
    prompt = [first, *range(1, prompt_len)]
    request = EngineRequest("r", prompt, [], SamplingParams())
    return Sequence(request, 0, 0, list(prompt), max_tokens)


def advance(scheduler: Scheduler, batch: Batch) -> list[Sequence]:
    """Settle, sample, and remove what is finished; returns that."""
    scheduler.settle(batch)
    finished = []
    for s in batch.scheduled:
        if s.samples:
            s.sequence.token_ids.append(0)
            if s.sequence.num_output_tokens == s.sequence.max_tokens:
                scheduler.remove(s.sequence)
                finished.append(s.sequence)
    return finished


lengths = st.tuples(st.integers(1, 10), st.integers(1, 6), st.integers(0, 1))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(lengths, min_size=1, max_size=8),
    st.integers(8, 20),
    st.integers(1, 5),
    st.integers(1, 12),
    st.data(),
)
def test_limits_hold_and_the_oldest_always_progresses(
    sizes: list[tuple[int, int, int]],
    num_blocks: int,
    max_seqs: int,
    budget: int,
    data: st.DataObject,
) -> None:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_seqs, budget, MAX_MODEL_LEN)
    to_come = [make_sequence(*size) for size in sizes]
    alive: list[Sequence] = []
    while to_come or alive:
        if to_come and (not alive or data.draw(st.booleans())):
            alive.append(to_come.pop(0))
            scheduler.add(alive[-1])
        batch = scheduler.schedule()
        assert 0 < batch.num_tokens <= budget
        assert scheduler.num_running <= max_seqs
        assert alive[0] in [s.sequence for s in batch.scheduled]
        tables = [block for sequence in alive for block in sequence.block_table]
        assert len(set(tables)) == num_blocks - pool.num_free
        assert sum(pool.ref_count(block) for block in range(num_blocks)) == len(tables)
        pool.check()
        for s in batch.scheduled:
            num_tokens = s.sequence.num_computed_tokens + s.num_new_tokens
            assert len(s.sequence.block_table) == -(-num_tokens // BLOCK_SIZE)
        for sequence in advance(scheduler, batch):
            alive.remove(sequence)
    assert not scheduler.has_work
    assert pool.num_free == num_blocks


def test_a_long_prompt_goes_in_chunks_and_decodes_go_first() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 4, MAX_MODEL_LEN)
    short, long = make_sequence(1), make_sequence(7)
    scheduler.add(short)
    scheduler.add(long)
    taken = []
    for _ in range(3):
        batch = scheduler.schedule()
        taken.append([(s.sequence is long, s.num_new_tokens, s.samples) for s in batch.scheduled])
        advance(scheduler, batch)
    assert taken == [
        [(False, 1, True), (True, 3, False)],
        [(False, 1, True), (True, 3, False)],
        [(False, 1, True), (True, 1, True)],
    ]


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


def test_the_latest_is_preempted_and_comes_back_first() -> None:
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN)
    first, second, third = make_sequence(8), make_sequence(8), make_sequence(1)
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


# -- the prefix cache -----------------------------------------------------------------------------


def new_tokens(scheduler: Scheduler) -> dict[Sequence, int]:
    """Of the next step, which is taken."""
    batch = scheduler.schedule()
    advance(scheduler, batch)
    return {s.sequence: s.num_new_tokens for s in batch.scheduled}


@pytest.mark.parametrize(("prompt_len", "num_cached"), [(7, 6), (8, 6), (9, 8), (2, 0), (1, 0)])
def test_all_full_blocks_but_the_one_of_the_last_token_are_taken(
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
    assert scheduler.prefix_query_tokens == 2 * prompt_len
    assert scheduler.prefix_hit_tokens == num_cached


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
    assert scheduler.prefix_query_tokens == 0


def test_nothing_is_found_before_a_token_has_been_sampled_behind_it() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 4, 6, MAX_MODEL_LEN)
    first, second = make_sequence(9), make_sequence(9)
    scheduler.add(first)
    scheduler.add(second)
    assert new_tokens(scheduler) == {first: 6}
    # Its blocks are written, but nobody knows yet whether with numbers.
    assert new_tokens(scheduler) == {first: 3, second: 3}
    third = make_sequence(9)
    scheduler.add(third)
    assert new_tokens(scheduler) == {first: 1, second: 5}
    assert new_tokens(scheduler) == {first: 1, second: 1, third: 1}


def choices_of(prompt_len: int, n: int) -> list[Sequence]:
    one = make_sequence(prompt_len)
    return [Sequence(one.request, i, 0, list(one.token_ids), 4) for i in range(n)]


def test_choices_wait_for_the_first_to_compute_their_prompt() -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    scheduler = Scheduler(pool, 8, 5, MAX_MODEL_LEN)
    first, second, third = choices_of(9, 3)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    assert new_tokens(scheduler) == {first: 5}
    assert new_tokens(scheduler) == {first: 4}
    assert new_tokens(scheduler) == {first: 1, second: 1, third: 1}
    assert first.block_table[:4] == second.block_table[:4] == third.block_table[:4]
    assert 32 - pool.num_free == 4 + 3


def test_choices_without_a_full_block_to_share_begin_together() -> None:
    scheduler = Scheduler(BlockPool(32, BLOCK_SIZE), 8, 32, MAX_MODEL_LEN)
    choices = choices_of(2, 3)
    for sequence in choices:
        scheduler.add(sequence)
    assert new_tokens(scheduler) == dict.fromkeys(choices, 2)


def test_free_blocks_that_are_taken_over_are_not_counted_twice() -> None:
    """8 blocks: 3 are held, 4 findable, 1 empty. Of 6 that are needed, 4 are found."""
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


def test_a_preempted_sequence_finds_what_is_left_of_its_blocks() -> None:
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
