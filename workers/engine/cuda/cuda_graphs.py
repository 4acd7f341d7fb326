"""Decode steps as CUDA graphs: one launch instead of some hundreds.

A graph replays the same kernels on the same memory. A batch is therefore copied into persistent
buffers and padded to the next bucket size. A row of padding writes nothing to the cache and attends
to no key, so it affects neither the cache nor other rows, and nothing reads its result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workers.engine.cuda.kernels.plan import (
    MERGE_WIDTH,
    PART_WIDTH,
    KernelPlan,
    TileParts,
    count_parts,
)
from workers.engine.cuda.kernels.tiling import Tiling
from workers.engine.model.step_plan import Window

LARGEST_BUCKET = 256
NO_SLOT = -1

Replay = Callable[[], Tensor]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return powers of two up to the first that fits `max_num_seqs`, at most `LARGEST_BUCKET`."""
    buckets = [1]
    while buckets[-1] < min(max_num_seqs, LARGEST_BUCKET):
        buckets.append(2 * buckets[-1])
    return buckets


def find_bucket(num_seqs: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket that fits `num_seqs`, or None."""
    return next((bucket for bucket in buckets if num_seqs <= bucket), None)


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Inputs of a decode step at fixed addresses; initially all rows are padding."""

    embeddings: Tensor  # [max_num_seqs, hidden_size]
    positions: Tensor  # [num_position_rows, max_num_seqs]
    slot_mapping: Tensor  # [max_num_seqs] int32
    block_table: Tensor  # [max_num_seqs, max_num_blocks] int32
    decodes: Mapping[Window, TileParts]  # as in the plan of `max_num_seqs` decodes
    num_slots: int
    """Decodes that run at once, as in the tiling of the plan."""

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_num_blocks: int,
        num_position_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tiling: Tiling,
        position_type: torch.dtype = torch.int64,
    ) -> "GraphBuffers":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_parts = count_parts(max_num_seqs, tiling.decode_slots)
        return cls(
            zeros(max_num_seqs, hidden_size, dtype=dtype),
            zeros(num_position_rows, max_num_seqs, dtype=position_type),
            zeros(max_num_seqs).fill_(NO_SLOT),
            zeros(max_num_seqs, max_num_blocks),
            {
                window: TileParts(
                    zeros(num_parts, PART_WIDTH), zeros(max_num_seqs, MERGE_WIDTH), num_parts
                )
                for window in tiling.windows
            },
            tiling.decode_slots,
        )

    def load(self, embeddings: Tensor, positions: Tensor, plan: KernelPlan, bucket: int) -> None:
        """Copy a step into the first rows and fill the rest of the bucket with padding.

        The parts and the merges of a plan have as many rows as its bucket.
        """
        num_seqs, num_blocks = plan.block_table.shape
        self.embeddings[:num_seqs].copy_(embeddings)
        self.positions[:, :num_seqs].copy_(positions)
        self.slot_mapping[:num_seqs].copy_(plan.slot_mapping)
        self.block_table[:num_seqs, :num_blocks].copy_(plan.block_table)
        for window, tiles in plan.decodes.items():
            buffers = self.decodes[window]
            buffers.parts[: len(tiles.parts)].copy_(tiles.parts)
            buffers.merges[: len(tiles.merges)].copy_(tiles.merges)
        if num_seqs < bucket:
            self.slot_mapping[num_seqs:bucket].fill_(NO_SLOT)

    def plan(self, bucket: int) -> KernelPlan:
        """Return the plan over the first `bucket` rows."""
        num_parts = count_parts(bucket, self.num_slots)
        decodes = {
            window: TileParts(tiles.parts[:num_parts], tiles.merges[:bucket], num_parts)
            for window, tiles in self.decodes.items()
        }
        return KernelPlan(
            self.slot_mapping[:bucket], self.block_table[:bucket], bucket, decodes, chunks={}
        )


class DecodeGraphs:
    """Recorded decode steps, one per bucket size."""

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, KernelPlan], Tensor],
        buffers: GraphBuffers,
        record: Callable[[Replay], Replay],
    ) -> None:
        """`forward` returns logits [num_seqs, vocab_size] for embeddings, positions and a plan.

        `record` runs a function once or more, and returns a function that replays it.
        """
        self._buffers = buffers
        self._replays: dict[int, Replay] = {}
        self._buckets = bucket_sizes(len(buffers.slot_mapping))
        # The largest comes first, so that the others fit into its memory pool.
        for bucket in reversed(self._buckets):
            inputs = (
                buffers.embeddings[:bucket],
                buffers.positions[:, :bucket],
                buffers.plan(bucket),
            )
            self._replays[bucket] = record(partial(forward, *inputs))

    def run(self, embeddings: Tensor, positions: Tensor, plan: KernelPlan) -> Tensor | None:
        """Return logits [num_seqs, vocab_size], which are valid until the next run.

        Returns None if no graph fits: for prefills, and for more sequences than the largest bucket.
        """
        bucket = find_bucket(plan.num_decodes, self._buckets)
        if plan.chunks or bucket is None:
            return None
        self._buffers.load(embeddings, positions, plan, bucket)
        return self._replays[bucket]()[: plan.num_decodes]


class CudaRecorder:
    """Records CUDA graphs that share a memory pool, because no two of them run at once.

    They also share the stream of the recordings: libraries keep a workspace for each stream. Other
    threads may use CUDA meanwhile.
    """

    NUM_WARM_UPS = 2
    """Runs before recording, which compile kernels and allocate the workspaces of libraries."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Replay) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
