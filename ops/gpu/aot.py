"""Compile the Triton kernels for sm_90 as models launch them, without a GPU.

    python -m ops.gpu aot                        # all models, five minutes on two cores
    python -m ops.gpu aot Qwen2.5-VL-7B --json build/aot.jsonl

The machine code of each kernel is read with the cuobjdump of Triton's wheel: registers, stack,
local loads and stores (LDL and STL, which are spilled registers), shared memory, products on the
matrix units (HGMMA, HMMA) and elsewhere (FFMA), and asynchronous copies (LDGSTS). The exit status
is 1 if a kernel spills, or needs more registers or shared memory than the chip has.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from workers.engine.cuda.kernels.activation import silu_mul
from workers.engine.cuda.kernels.attention import paged_attention
from workers.engine.cuda.kernels.norm import add_rms_norm, rms_norm
from workers.engine.cuda.kernels.plan import plan_for_kernels
from workers.engine.cuda.kernels.rotary import HeadNorm, Rotary, rotate_and_write, write_cache
from workers.engine.cuda.kernels.tiling import Tiling

CAPABILITY = 90
MAX_SHARED_BYTES, MAX_REGISTERS = 227 * 1024, 255
BLOCK_SIZE, CONTEXT = 16, 8192
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
EXACT_NAMES = ("LDL", "STL", "FFMA")
PREFIXES = ("HGMMA", "HMMA", "LDGSTS")
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    """Shape of a decoder, as far as kernels depend on it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    num_axes: int = 1
    has_head_norm: bool = False
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16
    has_sinks: bool = False


MODELS = {
    "Qwen2-VL-2B": Model(12, 2, 128, 1536, 8960, 3),
    "Qwen2.5-VL-7B": Model(28, 4, 128, 3584, 18944, 3),
    "Qwen2.5-VL-72B": Model(64, 8, 128, 8192, 29568, 3),
    "Qwen3-VL-2B": Model(16, 8, 128, 2048, 6144, 3, True),
    "Qwen3-VL-8B": Model(32, 8, 128, 4096, 12288, 3, True),
    "Qwen3-VL-30B-A3B": Model(32, 4, 128, 2048, 768, 3, True),
    "Llama-3.2-1B": Model(32, 8, 64, 2048, 8192),
    "SmolLM2-135M": Model(9, 3, 64, 576, 1536),
    "LLaVA-1.5-7B": Model(32, 32, 128, 4096, 11008),
    "Gemma-2-9B": Model(16, 8, 256, 3584, 14336, window=4096, softcap=50.0),
    "Gemma-3-4B": Model(8, 4, 256, 2560, 10240, window=1024),
    "gpt-oss-20b": Model(64, 8, 64, 2880, 2880, window=128, has_sinks=True),
    "Phi-3-mini": Model(32, 32, 96, 3072, 8192, window=2047),
    "Mistral-7B-v0.1": Model(32, 8, 128, 4096, 14336, window=4096),
    "Qwen2-VL-2B-fp16": Model(12, 2, 128, 1536, 8960, 3, dtype=torch.float16),
    "Qwen2-VL-2B-fp32": Model(12, 2, 128, 1536, 8960, 3, dtype=torch.float32),
    "MHA-fp32-256": Model(8, 8, 256, 2048, 2048, dtype=torch.float32),
    "GQA-fp32-64": Model(8, 2, 64, 512, 1536, dtype=torch.float32),
    # All that kernels have options for, with a head size that is no power of two.
    "GQA-fp16-80": Model(14, 2, 80, 1120, 4480, 1, True, 64, 30.0, torch.float16),
}


class AbsentDriver:
    """Driver of a GPU that kernels are compiled for and never launched on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def read_resources(kernel: Any) -> dict[str, int]:
    """Return the resources of a compiled kernel, and the number of some instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in EXACT_NAMES}
    counts |= {name: len(re.findall(rf"\b{name}", code)) for name in PREFIXES}
    return {
        "registers": int(used["REG"]),
        "stack": int(used["STACK"]),
        "local": int(used["LOCAL"]),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        **counts,
    }


def is_too_large(used: dict[str, int]) -> bool:
    """Return whether a kernel spills registers, or needs more of a resource than there is."""
    is_spilled = bool(used["LDL"] or used["STL"])
    return is_spilled or used["shared"] > MAX_SHARED_BYTES or used["registers"] > MAX_REGISTERS


class Compiler:
    """Compiles each kernel once instead of launching it, and prints its resources."""

    def __init__(self, file: TextIO | None) -> None:
        """Each kernel is a JSON line in `file`."""
        self.num_too_large = 0
        self.model = self.case = ""
        self._file = file
        self._hashes: set[str] = set()

    def install(self) -> None:
        driver.set_active(AbsentDriver())
        run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            if kernel.hash not in self._hashes:
                self._hashes.add(kernel.hash)
                self._report(function.__name__, kernel, time.perf_counter() - began_s)
            return kernel

        JITFunction.run = compile_only

    def _report(self, name: str, kernel: Any, seconds: float) -> None:
        used = read_resources(kernel)
        mark = ""
        if is_too_large(used):
            self.num_too_large += 1
            mark = "  <-- spills, or is too large"
        values = " ".join(f"{key} {value}" for key, value in used.items())
        sys.stdout.write(f"{self.model:18} {self.case:10} {name:18} {values}{mark}\n")
        sys.stdout.flush()
        if self._file is not None:
            place = {"model": self.model, "case": self.case, "kernel": name}
            line = {**place, "compile_s": round(seconds, 2), **used}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def compile_attention(model: Model, compiler: Compiler) -> None:
    """Compile decodes and a chunk, and the merges of their parts."""
    num_blocks = CONTEXT // BLOCK_SIZE
    cache = torch.zeros(8, BLOCK_SIZE, model.num_kv_heads, model.head_dim, dtype=model.dtype)
    tiling = Tiling.of(
        model.num_heads, [(model.num_kv_heads, model.head_dim)], model.dtype, [model.window]
    )
    for compiler.case, num_new in (("decode", 1), ("chunk", 40)):
        plan = plan_for_kernels(
            [[0] * num_blocks],
            [0, num_new],
            [CONTEXT],
            block_size=BLOCK_SIZE,
            tiling=tiling,
            device=cache.device,
        )
        num_rows = model.num_heads + 2 * model.num_kv_heads
        qkv = torch.zeros(num_new, num_rows, model.head_dim, dtype=model.dtype)
        query, scale = qkv[:, : model.num_heads], model.head_dim**-0.5
        sinks = qkv[0, : model.num_heads, 0].contiguous() if model.has_sinks else None
        paged_attention(query, cache, cache, plan, scale, model.window, model.softcap, sinks)


def compile_layer(model: Model, compiler: Compiler) -> None:
    """Compile the other kernels of a layer."""
    compiler.case = "layer"
    dtype, head_dim = model.dtype, model.head_dim
    x, weight = torch.zeros(4, model.hidden_size, dtype=dtype), torch.ones(model.hidden_size)
    weight = weight.to(dtype)
    rms_norm(x, weight, EPS)
    add_rms_norm(x, x, weight, EPS)
    silu_mul(torch.zeros(4, 2 * model.intermediate_size, dtype=dtype))
    cache = torch.zeros(8, BLOCK_SIZE, model.num_kv_heads, head_dim, dtype=dtype)
    angles, slots = torch.zeros(100, head_dim // 2, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    rotary = Rotary(angles, angles, torch.zeros(head_dim // 2, dtype=torch.int32))
    norm = HeadNorm(torch.ones(2, head_dim, dtype=dtype), EPS) if model.has_head_norm else None
    qkv = torch.zeros(4, model.num_heads + 2 * model.num_kv_heads, head_dim, dtype=dtype)
    positions = torch.zeros(model.num_axes, 4, dtype=torch.int64)
    rotate_and_write(qkv, positions, rotary, cache, cache, slots, norm)
    rows = torch.zeros(4, model.num_kv_heads, head_dim, dtype=dtype)
    write_cache(rows, rows, cache, cache, slots)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu aot", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"by default all: {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, help="file with a line for each kernel")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    if not CUOBJDUMP.is_file():
        raise SystemExit(f"Triton {triton.__version__} has no cuobjdump in its wheel; 3.6.0 has it")
    file = None
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        file = arguments.json.open("w")
    compiler = Compiler(file)
    compiler.install()
    for name in arguments.models or MODELS:
        compiler.model = name
        compile_attention(MODELS[name], compiler)
        compile_layer(MODELS[name], compiler)
    if compiler.num_too_large:
        sys.stderr.write(f"{compiler.num_too_large} kernels spill or are too large\n")
    return int(compiler.num_too_large > 0)
