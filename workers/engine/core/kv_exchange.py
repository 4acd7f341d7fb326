"""Exchange of KV blocks with other engines: the full blocks of a prompt, found by their hashes.

Only registered blocks are exported. These are verified, so a restored block may be found at once. A
restored block is a cache entry like any other: the request that it came with finds it when it is
scheduled, unless it has been evicted by then. The last token of a prompt has to yield logits, so
its block is neither exported nor restored.

Blocks are restored before each step, at most as many as the tokens of a step's budget fill, so that
running sequences continue while a long prompt is copied. Its request is admitted after the last
copy.
"""

from collections.abc import Sequence as Values
from typing import Protocol

from shared.protocol.multimodal import HashPart
from workers.engine.core.block_hash import block_hashes
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.scheduler import Scheduler
from workers.engine.core.sequence import EngineRequest, KVRun, ReceivedKV, Sequence
from workers.engine.core.step_runner import StepRunner


class NotWritten(Exception):
    """Raised by a memory that could not write blocks. The reason has been logged."""


class KVMemory(Protocol):
    """The content of KV blocks, in the layout of the runner's kernels."""

    @property
    def layout(self) -> list[HashPart]:
        """Layout that engines must share to exchange blocks, besides the model and its weights."""

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers."""

    def read_blocks(self, blocks: list[int]) -> list[memoryview]:
        """Return a copy of the blocks in parts; joined, they are the `data` of `write_blocks`."""

    def write_blocks(self, blocks: list[int], data: memoryview, skip: int) -> None:
        """Write blocks from `data`, which holds `skip` other blocks before them.

        Raises NotWritten.
        """


class KVExchange:
    """Exports and restores blocks between two steps."""

    def __init__(
        self, pool: BlockPool, scheduler: Scheduler, runner: StepRunner, memory: KVMemory | None
    ) -> None:
        """Without a `memory`, blocks are neither exported nor restored."""
        self._pool = pool
        self._scheduler = scheduler
        self._runner = runner
        self._memory = memory

    @property
    def layout(self) -> list[HashPart]:
        return [] if self._memory is None else self._memory.layout

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers; 0 if blocks cannot be exchanged."""
        return 0 if self._memory is None else self._memory.block_bytes

    def prompt_hashes(self, request: EngineRequest) -> list[str]:
        """Return the hashes of the blocks that can be exchanged. Any thread may call this."""
        return self._hashes_of(Sequence(request, 0, 0, request.prompt_token_ids, 0))

    def num_cached(self, hashes: Values[str]) -> int:
        """Return the length of the cached prefix of a chain.

        Any thread may call this, and the answer may be old: it saves transfers, no more.
        """
        return len(self._pool.find(hashes))

    def export(self, sequence: Sequence) -> list[KVRun]:
        """Return the blocks of a sequence that has ended, as far as they are registered."""
        run_bytes = sequence.request.export_run_bytes
        if self._memory is None or not run_bytes:
            return []
        hashes = self._hashes_of(sequence)
        blocks = self._pool.find(hashes)
        size = max(1, run_bytes // self._memory.block_bytes)
        return [
            KVRun(first, hashes[first:stop], tuple(self._memory.read_blocks(blocks[first:stop])))
            for first in range(0, len(blocks), size)
            for stop in (min(first + size, len(blocks)),)
        ]

    def restore(self) -> None:
        """Make received blocks of waiting requests findable, at most as many as a step may compute.

        Memory of blocks that are restored, or cannot be restored, is released at once.
        """
        num_left = max(1, self._scheduler.max_num_batched_tokens // self._pool.block_size)
        for sequence in self._scheduler.waiting:
            received = sequence.request.received
            if received is not None and received.runs and num_left > 0:
                num_left -= self._restore_blocks(sequence, received, num_left)

    def _restore_blocks(self, sequence: Sequence, received: ReceivedKV, max_blocks: int) -> int:
        """Return the number of blocks that were copied."""
        hashes = self._hashes_of(sequence)
        held = self._pool.find(hashes)
        is_evicted = len(held) < received.num_found  # It would be evicted again.
        if self._memory is None or not sequence.can_read_prefix_cache or is_evicted:
            received.drop()
            return 0
        # Freed blocks with unverified tokens are zeroed now: zeroing them later would destroy the
        # restored content.
        if unverified := self._scheduler.prefix_cache.take_unverified_blocks():
            self._runner.zero_blocks(unverified)
        num_found = len(held)
        # The blocks are held, so that the end of the chain does not evict its beginning.
        self._pool.share(held)
        try:
            while received.runs and len(held) < num_found + max_blocks:
                run = received.runs[0]
                if not self._restore_run(sequence, run, hashes, held, num_found + max_blocks):
                    del received.runs[0]
        except NotWritten:
            received.drop()  # The rest of the prompt is computed.
        finally:
            self._pool.release(reversed(held))
        received.num_found = len(held)
        return len(held) - num_found

    def _restore_run(
        self, sequence: Sequence, run: KVRun, hashes: list[str], held: list[int], max_held: int
    ) -> bool:
        """Restore the blocks of a run that follow `held`, add them to it, and return whether blocks
        of the run are left."""
        assert self._memory is not None
        stop, skip = run.first + len(run.hashes), len(held) - run.first
        num_missing = min(stop, max_held) - len(held)
        data = run.data[0] if len(run.data) == 1 else memoryview(b"".join(run.data))
        fits = data.nbytes == len(run.hashes) * self._memory.block_bytes
        if skip < 0 or num_missing <= 0 or run.hashes != hashes[run.first : stop] or not fits:
            return False
        if not self._pool.can_allocate(num_missing):
            return False
        first, blocks = len(held), self._pool.allocate(num_missing)
        held += blocks
        self._memory.write_blocks(blocks, data, skip)
        self._scheduler.prefix_cache.register_restored(sequence, first, blocks)
        return len(held) < stop

    def _hashes_of(self, sequence: Sequence) -> list[str]:
        block_size = self._pool.block_size
        return block_hashes(sequence, (sequence.num_prompt_tokens - 1) // block_size, block_size)
