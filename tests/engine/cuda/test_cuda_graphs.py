"""Decode steps in buckets: the choice, the padding, and that nothing of padding gets out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.engine.cuda.cuda_graphs import (
    LARGEST_BUCKET,
    CudaRecorder,
    DecodeGraphs,
    GraphBuffers,
    Replay,
    bucket_sizes,
    find_bucket,
)
from workers.engine.cuda.kernels.plan import KernelPlan, plan_for_kernels
from workers.engine.cuda.kernels.tiling import Tiling

CPU = torch.device("cpu")
TILING = Tiling(8, 2, 2, decode_slots=8, chunk_slots=8, windows=(None, 4))


@given(st.integers(1, 600))
def test_the_smallest_bucket_that_holds_a_batch(num_seqs: int) -> None:
    bucket = find_bucket(num_seqs, bucket_sizes(600))
    if num_seqs > LARGEST_BUCKET:
        assert bucket is None
    else:
        assert bucket is not None
        assert num_seqs <= bucket < 2 * num_seqs


def test_buckets_hold_every_batch_of_an_engine() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(5) == [1, 2, 4, 8]
    assert bucket_sizes(64)[-1] == 64
    assert bucket_sizes(1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def make_buffers(max_num_seqs: int) -> GraphBuffers:
    return GraphBuffers.allocate(max_num_seqs, 4, 1, 2, torch.float32, CPU, TILING)


def decode_plan(num_seqs: int) -> KernelPlan:
    return plan_for_kernels(
        [[i, i + 10] for i in range(num_seqs)],
        list(range(num_seqs + 1)),
        [5 + i % 3 for i in range(num_seqs)],
        block_size=4,
        tiling=TILING,
        device=CPU,
    )


def test_a_smaller_step_leaves_nothing_of_the_larger_one_before() -> None:
    buffers = make_buffers(4)
    for num_seqs in (4, 3):
        plan = decode_plan(num_seqs)
        positions = torch.full((1, num_seqs), 7)
        buffers.load(torch.full((num_seqs, 2), float(num_seqs)), positions, plan, 4)
    padded = buffers.plan(4)
    assert padded.slot_mapping.tolist() == [*decode_plan(3).slot_mapping.tolist(), -1]
    assert padded.block_table[:3, :2].equal(decode_plan(3).block_table)
    assert padded.num_decodes == 4
    assert not padded.chunks
    for window, tiles in padded.decodes.items():
        expected = decode_plan(3).decodes[window]
        assert tiles.parts.equal(expected.parts)
        assert tiles.merges.equal(expected.merges)
        assert expected.num_partials <= tiles.num_partials


class Recorder:
    """Record like a CUDA graph: a replay runs the same function on the same memory."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, run: Replay) -> Replay:
        self.num_recorded += 1
        output = run()

        def replay() -> Tensor:
            return output.copy_(run())

        return replay


@pytest.fixture
def graphs() -> DecodeGraphs:
    def forward(embeddings: Tensor, positions: Tensor, plan: KernelPlan) -> Tensor:
        return torch.stack(
            [embeddings[:, 0], positions[0], plan.slot_mapping, plan.block_table[:, 0]], dim=1
        )

    recorder = Recorder()
    graphs = DecodeGraphs(forward, make_buffers(4), recorder)
    assert recorder.num_recorded == 3
    return graphs


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 4])
def test_a_step_gets_its_own_rows(graphs: DecodeGraphs, num_seqs: int) -> None:
    plan = decode_plan(num_seqs)
    embeddings, positions = torch.rand(num_seqs, 2), torch.arange(num_seqs)[None]
    rows = graphs.run(embeddings, positions, plan)
    assert rows is not None
    expected = [embeddings[:, 0], positions[0], plan.slot_mapping, plan.block_table[:, 0]]
    assert rows.equal(torch.stack(expected, dim=1))
    assert graphs.num_padded == (1 if num_seqs == 3 else 0)


def test_prefills_and_large_batches_have_no_graph(graphs: DecodeGraphs) -> None:
    large = decode_plan(5)
    assert graphs.run(torch.rand(5, 2), torch.zeros(1, 5, dtype=torch.int64), large) is None
    mixed = plan_for_kernels(
        [[0], [1]],
        [0, 1, 4],
        [2, 3],
        block_size=4,
        tiling=TILING,
        device=CPU,
    )
    assert graphs.run(torch.rand(4, 2), torch.zeros(1, 4, dtype=torch.int64), mixed) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_recorded_graphs_compute_from_what_is_in_the_buffers_at_replay() -> None:
    buffer = torch.ones(4, device="cuda")
    record = CudaRecorder()
    replays = [record(lambda factor=factor: buffer * factor) for factor in (2, 3)]  # type: ignore[misc]
    buffer.fill_(5)
    assert [replay().tolist() for replay in replays] == [[10.0] * 4, [15.0] * 4]
