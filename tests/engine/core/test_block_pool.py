import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.core.block_pool import BlockPool

NUM_BLOCKS = 12
CONTENTS = [f"content {i}" for i in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Holders as sequences are: each has a table, the end of which it is still writing."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4, initial_order=reversed(range(NUM_BLOCKS)))
        self.held: list[list[int]] = []
        self.written: dict[int, str] = {}
        """Contents of the blocks that are no longer written."""

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        assert self.pool.can_allocate(num_blocks) == (num_blocks <= self.pool.num_free)
        if self.pool.can_allocate(num_blocks):
            self.held.append(self.pool.allocate(num_blocks))
            assert len(self.held[-1]) == num_blocks
            for block in self.held[-1]:
                assert self.pool.ref_count(block) == 1
                self.written.pop(block, None)

    @precondition(lambda self: any(self.unwritten()))
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def register(self, data: st.DataObject, content: str) -> None:
        block = data.draw(st.sampled_from(self.unwritten()))
        self.written[block] = content
        self.pool.register(block, content)
        assert self.pool.find([content])

    @rule(chain=st.lists(st.sampled_from(CONTENTS), max_size=4, unique=True))
    def share(self, chain: list[str]) -> None:
        blocks = self.pool.find(chain)
        assert [self.written[block] for block in blocks] == chain[: len(blocks)]
        assert len(blocks) == len(chain) or not self.pool.find(chain[len(blocks) :][:1])
        num_free = self.pool.num_free
        at_rest = [block for block in blocks if self.pool.ref_count(block) == 0]
        assert self.pool.can_allocate(num_free - len(at_rest), also_held=blocks)
        assert not self.pool.can_allocate(num_free - len(at_rest) + 1, also_held=blocks)
        self.pool.share(blocks)
        assert self.pool.num_free == num_free - len(at_rest)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @rule(blocks=st.sets(st.integers(0, NUM_BLOCKS - 1)))
    def forget(self, blocks: set[int]) -> None:
        self.pool.unregister(blocks)
        for content in CONTENTS:
            assert not blocks.intersection(self.pool.find([content]))

    def unwritten(self) -> list[int]:
        return [b for blocks in self.held for b in blocks if b not in self.written]

    @invariant()
    def every_block_is_free_or_held_as_often_as_it_is_in_tables(self) -> None:
        held = [block for blocks in self.held for block in blocks]
        assert self.pool.num_free == NUM_BLOCKS - len(set(held))
        assert all(self.pool.ref_count(b) == held.count(b) for b in range(NUM_BLOCKS))
        self.pool.check_integrity()

    @invariant()
    def nothing_is_found_that_is_being_written(self) -> None:
        for content in CONTENTS:
            assert not set(self.pool.find([content])).intersection(self.unwritten())

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.num_free == NUM_BLOCKS
        assert sorted(self.pool.allocate(NUM_BLOCKS)) == list(range(NUM_BLOCKS))
        assert not any(self.pool.find([content]) for content in CONTENTS)
        self.pool.check_integrity()


TestPool = PoolMachine.TestCase


def test_the_block_released_last_is_allocated_last() -> None:
    pool = BlockPool(3, 1)
    first, second = pool.allocate(2)
    pool.release([second])
    pool.release([first])
    assert pool.allocate(3) == [2, second, first]


def test_empty_blocks_are_allocated_before_least_recently_used_ones() -> None:
    pool = BlockPool(4, 1)
    for block, block_hash in zip(pool.allocate(3), "abc", strict=True):
        pool.register(block, block_hash)
    pool.release([0, 1, 2])
    # A use, though a short one, makes it the latest.
    pool.share(pool.find("a"))
    pool.release([0])
    assert (pool.allocate(1), pool.num_evictions) == ([3], 0)
    assert (pool.allocate(2), pool.num_evictions) == ([1, 2], 2)
    assert (pool.find("a"), pool.find("b"), pool.find("c")) == ([0], [], [])


def test_the_first_of_two_equal_blocks_is_found() -> None:
    pool = BlockPool(2, 1)
    first, second = pool.allocate(2)
    pool.register(first, "a")
    pool.register(second, "a")
    pool.release([second])
    assert pool.find("a") == [first]
    assert pool.allocate(1) == [second]
    assert pool.num_evictions == 0


def test_releasing_a_free_block_fails() -> None:
    with pytest.raises(AssertionError, match="not held"):
        BlockPool(2, 1).release([0])


def test_only_held_blocks_can_be_registered_and_only_once() -> None:
    pool = BlockPool(2, 1)
    with pytest.raises(AssertionError, match="not held"):
        pool.register(0, "a")
    (block,) = pool.allocate(1)
    pool.register(block, "a")
    with pytest.raises(AssertionError, match="registered"):
        pool.register(block, "b")
    with pytest.raises(AssertionError, match="not registered"):
        pool.share([1])


@pytest.mark.parametrize("order", [[0, 0], [0], [0, 2]])
def test_an_initial_order_must_contain_every_block_once(order: list[int]) -> None:
    with pytest.raises(AssertionError, match="disagree"):
        BlockPool(2, 1, initial_order=order)
