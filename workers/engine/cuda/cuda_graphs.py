"""Decode steps as CUDA graphs: one launch in place of some hundreds.

A graph replays the same kernels on the same memory, so a batch is copied into buffers that stay,
and padded to the next of a few sizes. A row of padding looks at one token that was there before
and writes nothing: it reaches neither the cache nor other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workers.engine.cuda.kernels.plan import KernelPlan, count_splits

LARGEST_BUCKET = 256
NO_SLOT = -1

Replay = Callable[[], Tensor]


def buckets_for(max_num_seqs: int) -> list[int]:
    """Powers of two, up to the first that holds every batch, or to the largest there is."""
    buckets = [1]
    while buckets[-1] < min(max_num_seqs, LARGEST_BUCKET):
        buckets.append(2 * buckets[-1])
    return buckets


def bucket_of(num_seqs: int, buckets: Sequence[int]) -> int | None:
    """The smallest that holds so many; None when none does."""
    return next((bucket for bucket in buckets if num_seqs <= bucket), None)


@dataclass(frozen=True, slots=True)
class Buffers:
    """A decode step's inputs, at addresses that do not change; all of it is padding at first."""

    embeddings: Tensor  # [max_num_seqs, hidden_size]
    positions: Tensor  # [num_position_rows, max_num_seqs] int64
    slots: Tensor  # [max_num_seqs] int32
    decodes: Tensor  # [max_num_seqs, 4] int32, as in the plan
    block_table: Tensor  # [max_num_seqs, max_num_blocks] int32
    padding: Tensor  # what `decodes` are without a step: each one query, at position 0

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_num_blocks: int,
        num_position_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Buffers":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        padding = torch.stack([rows, rows * 0 + 1, rows * 0, rows], dim=1)
        return cls(
            zeros(max_num_seqs, hidden_size, dtype=dtype),
            zeros(num_position_rows, max_num_seqs, dtype=torch.int64),
            zeros(max_num_seqs).fill_(NO_SLOT),
            padding.clone(),
            zeros(max_num_seqs, max_num_blocks),
            padding,
        )

    def fill(self, embeddings: Tensor, positions: Tensor, plan: KernelPlan, bucket: int) -> None:
        """The first rows with the step, the rest of the bucket with padding."""
        num_seqs, num_blocks = plan.block_table.shape
        self.embeddings[:num_seqs].copy_(embeddings)
        self.positions[:, :num_seqs].copy_(positions)
        self.slots[:num_seqs].copy_(plan.slots)
        self.decodes[:num_seqs].copy_(plan.decodes)
        self.block_table[:num_seqs, :num_blocks].copy_(plan.block_table)
        if num_seqs < bucket:
            self.slots[num_seqs:bucket].fill_(NO_SLOT)
            self.decodes[num_seqs:bucket].copy_(self.padding[num_seqs:bucket])

    def plan(self, bucket: int, num_kv_heads: int) -> KernelPlan:
        """Of the first rows."""
        return KernelPlan(
            slots=self.slots[:bucket],
            decodes=self.decodes[:bucket],
            chunks=self.decodes[:0],
            block_table=self.block_table[:bucket],
            num_splits=count_splits(bucket, num_kv_heads),
        )


class DecodeGraphs:
    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, KernelPlan], Tensor],
        buffers: Buffers,
        num_kv_heads: int,
        record: Callable[[Replay], Replay],
    ) -> None:
        """`forward` makes logits of embeddings, positions and a plan: [num_seqs, vocab_size].

        `record` runs what it is given, and returns what does the same again.
        """
        self._buffers = buffers
        self._replays: dict[int, Replay] = {}
        self._buckets = buckets_for(len(buffers.slots))
        # The largest first, so that the others find room in its memory.
        for bucket in reversed(self._buckets):
            inputs = (
                buffers.embeddings[:bucket],
                buffers.positions[:, :bucket],
                buffers.plan(bucket, num_kv_heads),
            )
            self._replays[bucket] = record(partial(forward, *inputs))

    def run(self, embeddings: Tensor, positions: Tensor, plan: KernelPlan) -> Tensor | None:
        """Logits, [num_seqs, vocab_size], until the next run; None for a batch that has no graph.

        There is none for prefills, nor for more sequences than any bucket holds.
        """
        bucket = bucket_of(len(plan.decodes), self._buckets)
        if len(plan.chunks) or bucket is None:
            return None
        self._buffers.fill(embeddings, positions, plan, bucket)
        return self._replays[bucket]()[: len(plan.decodes)]


class CudaRecorder:
    """Records CUDA graphs that share their memory: no two of them run at once."""

    NUM_WARM_UPS = 2
    """Before a graph is recorded: kernels are compiled, and libraries take their workspaces."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
