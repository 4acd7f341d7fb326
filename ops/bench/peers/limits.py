"""Measure the current limits of the machine, as a separate process; print Limits as JSON.

python -m ops.bench.peers.limits THREADS
"""

import sys
import time
from collections.abc import Callable

import torch

from ops.bench.peers import protocol
from ops.bench.peers.floors import Limits

# This is far larger than any cache.
READ_BYTES = 2 * 2**30
# The weights fit into a core's cache, so that only arithmetic limits the rates. The shapes are of
# matrices of small models, and of a large one.
MATRICES = ((576, 1536), (896, 4864), (2048, 2048))
ROWS = (16, 32, 256, 2048)
NUM_TRIES = 5
TRY_FLOPS = 4e9
"""Operations in a try, with which the overhead of a call is negligible."""


def measure() -> Limits:
    return Limits(read_bytes_s(), {rows: gemm_flops_s(rows) for rows in ROWS})


def read_bytes_s() -> float:
    memory = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best_s(memory.sum)


@torch.inference_mode()
def gemm_flops_s(num_rows: int) -> float:
    return max(_product_flops_s(num_rows, *matrix) for matrix in MATRICES)


def _product_flops_s(num_rows: int, width_in: int, width_out: int) -> float:
    rows = torch.randn(num_rows, width_in, dtype=torch.bfloat16)
    weight = torch.randn(width_out, width_in, dtype=torch.bfloat16)
    flops = 2 * num_rows * width_in * width_out
    count = max(1, int(TRY_FLOPS / flops))

    def multiply() -> None:
        for _ in range(count):
            torch.nn.functional.linear(rows, weight)

    return count * flops / _best_s(multiply)


def _best_s(call: Callable[[], object]) -> float:
    took_s = []
    for _ in range(NUM_TRIES + 1):  # The first call fills caches.
        began_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - began_s)
    return min(took_s[1:])


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    sys.stdout.write(protocol.write(measure()))
