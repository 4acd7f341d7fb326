"""An engine of several ranks in one process: a thread for each, with real pipes and real gloo."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedModel

from shared.models.registry import adapt
from shared.vision.rank_plan import Share
from shared.vision.weights import load_weights
from workers.engine.cuda.profiling import CudaMemory, DeviceMemory
from workers.engine.model.flat_model import FlatModel
from workers.engine.parallel.process_group import ProcessGroup
from workers.engine.parallel.rank_watch import RankWatch
from workers.engine.parallel.sharded_model import RankMemory, ShardedModel, follow

FREE_BYTES = 900 * 2**20
"""Memory of each rank other than 0 before it was loaded."""


@contextmanager
def sharded(
    model: PreTrainedModel,
    folder: Path,
    num_ranks: int,
    without: Sequence[str] = (),
    memory: DeviceMemory | None = None,
) -> Iterator[tuple[ShardedModel, list[RankMemory]]]:
    """Save a model, and load a part of it in each of several threads.

    Yields the model, and readers of the ranks' `memory`.
    """
    model.save_pretrained(folder)
    store = dist.HashStore()
    pipes = [(os.pipe(), os.pipe()) for _ in range(1, num_ranks)]
    shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
    # One after another: transformers changes defaults of the process while it loads a model.
    weights = [
        load_weights(type(model), folder, model.dtype, "cpu", without, share=share)
        for share in shares
    ]
    parts = [FlatModel(adapt(part)) for part in weights]

    def join(rank: int) -> ProcessGroup:
        return ProcessGroup(store, shares[rank], parts[rank].device)

    def run(rank: int, source: int, sink: int) -> None:
        with os.fdopen(source, "rb") as commands, os.fdopen(sink, "wb") as answers:
            follow(parts[rank], join(rank), commands, answers, memory or CudaMemory())

    threads = [
        threading.Thread(target=run, args=(rank, source, sink))
        for rank, ((source, _), (_, sink)) in enumerate(pipes, 1)
    ]
    for thread in threads:
        thread.start()
    followers = [os.fdopen(sink, "wb") for (_, sink), _ in pipes]
    readers = [os.fdopen(source, "rb") for _, (source, _) in pipes]
    watch = RankWatch({rank: os.getpid() for rank in range(1, num_ranks)}, 60.0)
    memories = [
        RankMemory(*files, FREE_BYTES, watch) for files in zip(followers, readers, strict=True)
    ]
    try:
        yield ShardedModel(parts[0], join(0), followers), memories
    finally:
        for file in (*followers, *readers):
            file.close()
        for thread in threads:
            thread.join()
