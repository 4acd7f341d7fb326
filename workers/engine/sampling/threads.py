"""The number of threads of PyTorch's operations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone.

    Operations on logits take about 10 µs. With several threads, each operation ends with a wait for
    all of them, which takes far longer when another process uses a core. Waiting threads also spin
    on cores that the model's kernels use next.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
