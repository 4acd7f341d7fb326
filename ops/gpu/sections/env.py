"""The card, the versions, the ceilings, and the cost of a launch and of a round trip."""

import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ops.gpu.session import Session
from ops.gpu.timing import copy_rate, matrix_rate, time_call
from ops.harness.machine import commit

PACKAGES = ("torch", "triton", "transformers", "numpy", "tokenizers", "huggingface-hub")
TOOLS = ("gcc", "nvcc", "ncu", "compute-sanitizer", "cuobjdump")
SMI_FIELDS = "name,driver_version,memory.used,clocks.sm,clocks.mem,power.draw,mig.mode.current"
COMMIT = Path(".gpu/commit.txt")
"""Commit of a tree without its history, from `python -m ops.gpu prepare`."""


def run(session: Session) -> None:
    session.add("commit", name=COMMIT.read_text().strip() if COMMIT.exists() else commit())
    versions: dict[str, object] = {name: importlib.metadata.version(name) for name in PACKAGES}
    session.add("versions", **versions)
    session.add("tools", **{tool: bool(shutil.which(tool)) for tool in TOOLS})
    if session.dry:
        return
    card = torch.cuda.get_device_properties(0)
    session.add(
        "device",
        name=card.name,
        multiprocessors=card.multi_processor_count,
        memory_gib=card.total_memory / 2**30,
        l2_mib=getattr(card, "L2_cache_size", 0) >> 20,
        shared_bytes=getattr(card, "shared_memory_per_block_optin", 0),
    )
    query = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    session.add("nvidia-smi", text=done.stdout.strip())
    session.add("copy", tb_s=copy_rate(session.device) / 1e12)
    session.add("product of 8192 in bf16", tflop_s=matrix_rate(session.device) / 1e12)
    _measure_linears(session)
    _measure_round_trips(session)


def _measure_linears(session: Session) -> None:
    """Measure a product with few rows, which reads its weights once."""
    device, dtype = session.device, session.dtype
    weight = torch.randn(18944 * 2, 3584, device=device, dtype=dtype)
    for num_rows in (1, 16, 32, 128, 256):
        x = torch.randn(num_rows, 3584, device=device, dtype=dtype)
        seconds = time_call(lambda x=x: F.linear(x, weight), device)  # type: ignore[misc]
        what = f"linear {num_rows} x 3584 x 37888"
        session.add(what, us=seconds * 1e6, tb_s=weight.nbytes / seconds / 1e12)


def _measure_round_trips(session: Session) -> None:
    number = torch.zeros(1, device=session.device)
    values = list(range(256))

    def seconds_of(call: Callable[[], object], num_calls: int) -> float:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - began_s) / num_calls

    def copy_list() -> object:
        return torch.as_tensor(values, dtype=torch.int64).to(session.device)

    session.add(
        "host",
        launch_us=seconds_of(lambda: number.add_(1), 2000) * 1e6,
        tolist_us=seconds_of(number.tolist, 300) * 1e6,
        list_of_256_to_device_us=seconds_of(copy_list, 300) * 1e6,
    )
