"""Iteration over rows of logits in chunks, for operations with results as large as the rows.

Each chunk reuses the memory of the previous chunk, which is still in the CPU's cache.
"""

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor

Row = TypeVar("Row")

CPU_CHUNK_LOGITS = 1 << 20
"""Logits per chunk, at least one row; in float32 they take 4 MiB."""


def iterate_chunks(rows: list[Row], logits: Tensor) -> Iterator[list[Row]]:
    """Yield `rows` in chunks: several on a CPU, and one with all rows on a GPU."""
    chunk_size = len(rows)
    if logits.device.type == "cpu":
        chunk_size = max(1, CPU_CHUNK_LOGITS // logits.shape[1])
    for start in range(0, len(rows), max(1, chunk_size)):
        yield rows[start : start + chunk_size]


def take_rows(values: Tensor, rows: list[int]) -> Tensor:
    """Return the given rows, as a view if they follow each other."""
    first, stop = rows[0], rows[0] + len(rows)
    return values[first:stop] if rows == list(range(first, stop)) else values[rows]
