"""Which KV blocks are free and which are held; it knows neither sequences nor what blocks contain.

Every block is either in the free list with a reference count of 0, or held with a count above 0.
"""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    def __init__(
        self, num_blocks: int, block_size: int, order: Iterable[int] | None = None
    ) -> None:
        """`order` is the order in which blocks are given out at first; by number by default."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Least recently used first: what was released last stays untouched longest.
        self._free = deque(range(num_blocks) if order is None else order)
        self._ref_counts = [0] * num_blocks
        self.check()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        assert self.can_allocate(num_blocks)
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each; a block without any is free again."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def check(self) -> None:
        """The free list holds exactly the blocks without a reference, each of them once."""
        unreferenced = [block for block, count in enumerate(self._ref_counts) if count == 0]
        assert sorted(self._free) == unreferenced, "the free list and the counts disagree"
