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
from workers.engine.model.flat_model import FlatModel
from workers.engine.parallel.process_group import ProcessGroup
from workers.engine.parallel.sharded_model import ShardedModel, follow


@contextmanager
def sharded(
    model: PreTrainedModel, folder: Path, num_ranks: int, without: Sequence[str] = ()
) -> Iterator[ShardedModel]:
    """Save a model, and load a part of it in each of several threads."""
    model.save_pretrained(folder)
    store = dist.HashStore()
    pipes = [os.pipe() for _ in range(1, num_ranks)]
    shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
    # One after another: transformers changes defaults of the process while it loads a model.
    weights = [
        load_weights(type(model), folder, model.dtype, "cpu", without, share=share)
        for share in shares
    ]
    parts = [FlatModel(adapt(part)) for part in weights]

    def join(rank: int) -> ProcessGroup:
        return ProcessGroup(store, shares[rank], parts[rank].device)

    def run(rank: int, source: int) -> None:
        with os.fdopen(source, "rb") as commands:
            follow(parts[rank], join(rank), commands)

    threads = [
        threading.Thread(target=run, args=(rank, source))
        for rank, (source, _) in enumerate(pipes, 1)
    ]
    for thread in threads:
        thread.start()
    followers = [os.fdopen(sink, "wb") for _, sink in pipes]
    try:
        yield ShardedModel(parts[0], join(0), followers)
    finally:
        for follower in followers:
            follower.close()
        for thread in threads:
            thread.join()
