"""Compiles every kernel as it is launched, for a GPU that need not be there.

    python -m tests.engine.cuda.kernels.compiling <compute capability, such as 90>

The interpreter runs what the compiler may refuse. Prints a line for each kernel: its name and the
bytes of shared memory that a program of it takes.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from workers.engine.cuda.kernels.activation import silu_mul
from workers.engine.cuda.kernels.attention import paged_attention
from workers.engine.cuda.kernels.norm import add_rms_norm, rms_norm
from workers.engine.cuda.kernels.plan import KernelPlan, count_queries, plan_for_kernels
from workers.engine.cuda.kernels.rotary import HeadNorm, Rotary, rotate_and_write, write_cache

BLOCK_SIZE = 16


class Absent:
    """A driver of a GPU that kernels are compiled for and never launched on."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_launching() -> None:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        sys.stdout.write(f"{self.__name__} {kernel.metadata.shared}\n")
        return kernel

    JITFunction.run = compile_only


def attend(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Four decodes with split keys, many decodes with whole keys, and a chunk."""
    cache = torch.zeros(8, BLOCK_SIZE, 2, head_dim, dtype=dtype)
    for num_new in ([1] * 4, [1] * 300, [40]):
        plan = make_plan(num_new, group, head_dim, dtype)
        query = torch.zeros(sum(num_new), 2 * group, head_dim, dtype=dtype)
        paged_attention(query, cache, cache, plan, 0.1, window, softcap)


def make_plan(num_new: list[int], group: int, head_dim: int, dtype: torch.dtype) -> KernelPlan:
    return plan_for_kernels(
        [[0, 1, 2]] * len(num_new),
        [sum(num_new[:i]) for i in range(len(num_new) + 1)],
        [n + 3 for n in num_new],
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        queries_per_tile=count_queries(group, head_dim, dtype),
        device=torch.device("cpu"),
    )


def the_rest(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(4, 1536, dtype=dtype), torch.ones(1536, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6)
    silu_mul(x)
    table, slots = torch.zeros(100, 64, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    rotary = Rotary(table, table, torch.zeros(64, dtype=torch.int32))
    cache = torch.zeros(8, BLOCK_SIZE, 2, 128, dtype=dtype)
    positions = torch.zeros(1, 4, dtype=torch.int64)
    for norm in (None, HeadNorm(torch.ones(2, 128, dtype=dtype), 1e-6)):
        qkv = torch.zeros(4, 16, 128, dtype=dtype)
        rotate_and_write(qkv, positions, rotary, cache, cache, slots, norm)
    write_cache(qkv[:, :2].contiguous(), qkv[:, 2:4].contiguous(), cache, cache, slots)


def main() -> None:
    driver.set_active(Absent(int(sys.argv[1])))
    compile_instead_of_launching()
    attend(torch.bfloat16, 128, 6)
    attend(torch.float16, 80, 7, window=64, softcap=30.0)
    attend(torch.bfloat16, 256, 2)
    attend(torch.float32, 64, 4)
    the_rest(torch.bfloat16)


if __name__ == "__main__":
    main()
