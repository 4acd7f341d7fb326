import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.blocks import BlockPool

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4, order=reversed(range(NUM_BLOCKS)))
        self.held: list[list[int]] = []

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        assert self.pool.can_allocate(num_blocks) == (num_blocks <= self.pool.num_free)
        if self.pool.can_allocate(num_blocks):
            self.held.append(self.pool.allocate(num_blocks))
            assert len(self.held[-1]) == num_blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @invariant()
    def every_block_is_free_or_held_once(self) -> None:
        held = [block for blocks in self.held for block in blocks]
        assert len(held) == len(set(held))
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert all(self.pool.ref_count(b) == (b in held) for b in range(NUM_BLOCKS))
        self.pool.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=50)


def test_the_block_released_last_is_given_out_last() -> None:
    pool = BlockPool(3, 1)
    first, second = pool.allocate(2)
    pool.release([second])
    pool.release([first])
    assert pool.allocate(3) == [2, second, first]


def test_releasing_a_free_block_is_refused() -> None:
    with pytest.raises(AssertionError, match="not held"):
        BlockPool(2, 1).release([0])


@pytest.mark.parametrize("order", [[0, 0], [0], [0, 2]])
def test_an_order_must_name_every_block_once(order: list[int]) -> None:
    with pytest.raises(AssertionError, match="disagree"):
        BlockPool(2, 1, order=order)
