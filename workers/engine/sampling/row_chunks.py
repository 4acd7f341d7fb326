"""Iteration over rows of logits in chunks that fit a CPU's cache.

A chunk stays in the cache between two passes over it, and the next chunk reuses its memory.
"""

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor

Row = TypeVar("Row")

CPU_CHUNK_LOGITS = 1 << 18
"""Logits per chunk, at least one row; in float32 and int64 together they take 3 MiB."""


def iterate_chunks(rows: list[Row], logits: Tensor) -> Iterator[list[Row]]:
    """Yield `rows` in chunks: several on a CPU, and one with all rows on a GPU."""
    chunk_size = len(rows)
    if logits.device.type == "cpu":
        chunk_size = max(1, CPU_CHUNK_LOGITS // logits.shape[1])
    for start in range(0, len(rows), max(1, chunk_size)):
        yield rows[start : start + chunk_size]
