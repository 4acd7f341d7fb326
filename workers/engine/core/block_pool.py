"""Which KV blocks are free, held, or free and still worth finding; not whose they are.

Every block is in one of three places:

held      it has a reference count above 0, one for each sequence whose table it is in
empty     free, and nothing in it is of use
findable  free, but registered: it is found by the hash of its content until it is given out again

Held blocks may be registered too. Whoever registers one must be done with writing it, for from then
on others read it: the pool gives a block out for writing only when nobody holds it, and without its
hash.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from workers.engine.core.kv_events import KVEvents


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        order: Iterable[int] | None = None,
        events: KVEvents | None = None,
    ) -> None:
        """`order` is the order in which blocks are given out at first; by number by default.
        `events` is told what cannot be found any more, and by whoever registers what can."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.events = events
        self.num_evictions = 0
        """Findable blocks that were given out for something else."""
        # Both least recently used first: what was released last stays untouched longest.
        self._empty = deque(range(num_blocks) if order is None else order)
        self._findable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._hash_of: dict[int, str] = {}
        self._block_of: dict[str, int] = {}
        self.check()

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._findable)

    def can_allocate(self, num_blocks: int, beside: Collection[int] = ()) -> bool:
        """Whether so many could be given out if those of `beside` were held."""
        return num_blocks <= self.num_free - sum(not self._ref_counts[block] for block in beside)

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks to be written, each with one reference; empty ones first."""
        assert self.can_allocate(num_blocks)
        blocks = [self._give_out() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each; a block without any is free again.

        The first of them is the first to be evicted, so a chain goes in from its end: without its
        beginning the rest could not be found.
        """
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._hash_of:
                    self._findable[block] = None
                else:
                    self._empty.append(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    # -- shared content -------------------------------------------------------------------------

    def register(self, block: int, block_hash: str) -> bool:
        """The block is held, written, and will not be written again: it may be found.

        Of two blocks with the same content only the first is; returns whether this one is.
        """
        assert self._ref_counts[block] > 0, f"block {block} is not held"
        assert block not in self._hash_of, f"block {block} is registered"
        if block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def find(self, hashes: Sequence[str]) -> list[int]:
        """Blocks of the longest beginning of the chain that is registered; still to be shared."""
        found = []
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these, which have just been found or are held."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert block in self._hash_of, f"block {block} is free and not registered"
                del self._findable[block]
            self._ref_counts[block] += 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody is to find these any more; who holds them keeps them."""
        for block in blocks:
            if block in self._hash_of:
                self._unregister(block)
                if self._ref_counts[block] == 0:
                    del self._findable[block]
                    self._empty.append(block)

    @property
    def registered(self) -> set[str]:
        """Hashes of all blocks that can be found."""
        return set(self._block_of)

    def check(self) -> None:
        """Every block is in one place, once, and hashes agree from both sides."""
        unreferenced = [block for block, count in enumerate(self._ref_counts) if count == 0]
        free = sorted([*self._empty, *self._findable])
        assert free == unreferenced, "the free lists and the counts disagree"
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of
        assert all(block in self._hash_of for block in self._findable)
        assert not any(block in self._hash_of for block in self._empty)

    def _give_out(self) -> int:
        if self._empty:
            return self._empty.popleft()
        block, _ = self._findable.popitem(last=False)
        self._unregister(block)
        self.num_evictions += 1
        return block

    def _unregister(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self.events is not None:
            self.events.removed(block_hash)
