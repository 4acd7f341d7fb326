"""Pool of KV blocks with reference counts, and a map from content hashes to blocks.

Every block is in one of three states:

held      its reference count is above 0: one for each sequence with this block in its block table
empty     it is free and its content is not registered
findable  it is free but registered: it can be found by its hash until it is allocated again

Held blocks may be registered too. A sequence must register a block only after writing it for the
last time, because other sequences read it from then on. The pool allocates a block for writing only
when its count is 0, and removes its hash.

Eviction in least recently used order and the free list follow vLLM's block pool.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from workers.engine.core.kv_events import KVEvents


class BlockPool:
    """Allocates, shares and frees KV blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        initial_order: Iterable[int] | None = None,
        events: KVEvents | None = None,
    ) -> None:
        """`initial_order` is the order of the first allocations, ascending by default."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.events = events
        self.num_evictions = 0
        """Findable blocks that were allocated for other content."""
        self._hash_by_block: dict[int, str] = {}
        self._block_by_hash: dict[str, int] = {}
        # Both are in order of release: the block released last is allocated last.
        self._empty = deque(range(num_blocks) if initial_order is None else initial_order)
        self._findable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self.check_integrity()

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._findable)

    def can_allocate(self, num_blocks: int, also_held: Collection[int] = ()) -> bool:
        """Return True if `num_blocks` blocks are free, not counting the blocks in `also_held`."""
        return num_blocks <= self.num_free - sum(not self._ref_counts[block] for block in also_held)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return blocks to be written, each with one reference; empty blocks are used first."""
        assert self.can_allocate(num_blocks)
        blocks = [self._pop_free() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; blocks without references become free.

        The first block is the first to be evicted. Callers therefore pass a chain from its end:
        without its first blocks the rest could not be found.
        """
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._hash_by_block:
                    self._findable[block] = None
                else:
                    self._empty.append(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    # -- shared content -------------------------------------------------------------------------

    def register(self, block: int, block_hash: str) -> bool:
        """Make a held block findable by its hash; it must not be written again.

        Returns False, and does nothing, if another block with that content is registered.
        """
        assert self._ref_counts[block] > 0, f"block {block} is not held"
        assert block not in self._hash_by_block, f"block {block} is registered"
        if block_hash in self._block_by_hash:
            return False
        self._block_by_hash[block_hash] = block
        self._hash_by_block[block] = block_hash
        return True

    def find(self, hashes: Sequence[str]) -> list[int]:
        """Return the blocks of the longest registered prefix of the chain, without references."""
        blocks = []
        for block_hash in hashes:
            if (block := self._block_by_hash.get(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; blocks must be held, or just have been found."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert block in self._hash_by_block, f"block {block} is free and not registered"
                del self._findable[block]
            self._ref_counts[block] += 1

    def unregister(self, blocks: Iterable[int]) -> None:
        """Remove the hashes of these blocks; references to them stay valid."""
        for block in blocks:
            if block in self._hash_by_block:
                self._remove_hash(block)
                if self._ref_counts[block] == 0:
                    del self._findable[block]
                    self._empty.append(block)

    def check_integrity(self) -> None:
        """Assert that each block is in one state and that both hash maps agree."""
        unreferenced = [block for block, count in enumerate(self._ref_counts) if count == 0]
        free = sorted([*self._empty, *self._findable])
        assert free == unreferenced, "the free lists and the reference counts disagree"
        assert {
            block: block_hash for block_hash, block in self._block_by_hash.items()
        } == self._hash_by_block
        assert all(block in self._hash_by_block for block in self._findable)
        assert not any(block in self._hash_by_block for block in self._empty)

    def _pop_free(self) -> int:
        if self._empty:
            return self._empty.popleft()
        block, _ = self._findable.popitem(last=False)
        self._remove_hash(block)
        self.num_evictions += 1
        return block

    def _remove_hash(self, block: int) -> None:
        block_hash = self._hash_by_block.pop(block)
        del self._block_by_hash[block_hash]
        if self.events is not None:
            self.events.add_removed(block_hash)
