"""The number of threads of PyTorch's operations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone.

    Operations on logits take some 10 µs. Threads that wait for each other at the end of each take
    far longer where another process has the core, and turn on the core that the model's kernels
    use next.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
