from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sampling import SamplingParams
from workers.engine.blocks import BlockPool
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Batch, EngineRequest, Sequence, Status

MAX_MODEL_LEN = 16
BLOCK_SIZE = 2


def make_sequence(prompt_len: int, max_tokens: int = 4) -> Sequence:
    prompt = list(range(prompt_len))
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


lengths = st.tuples(st.integers(1, 10), st.integers(1, 6))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(lengths, min_size=1, max_size=8),
    st.integers(8, 20),
    st.integers(1, 5),
    st.integers(1, 12),
    st.data(),
)
def test_limits_hold_and_the_oldest_always_progresses(
    sizes: list[tuple[int, int]], num_blocks: int, max_seqs: int, budget: int, data: st.DataObject
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
