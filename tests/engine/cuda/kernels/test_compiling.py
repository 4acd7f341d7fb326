"""Every kernel compiles for Hopper, and fits into the shared memory of smaller chips."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from ops.gpu.aot import MODELS, is_too_large

KERNELS = {
    "_attend",
    "_merge_parts",
    "_rms_norm",
    "_silu_mul",
    "_rotate_and_write",
    "_write_cache",
}
# Limit per program: Hopper has 227 KiB, the smaller chips of the Ada generation have 99 KiB.
SHARED_BYTES = 99 * 2**10


@pytest.mark.parametrize(
    "models", [("SmolLM2-135M", "GQA-fp32-64"), pytest.param(MODELS, marks=pytest.mark.long)]
)
def test_no_kernel_spills_on_hopper_and_each_fits_elsewhere(
    tmp_path: Path, models: Iterable[str]
) -> None:
    # A separate process, because Triton may be set to interpret in this one.
    file = tmp_path / "kernels.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "ops.gpu", "aot", *models, "--json", str(file)],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [json.loads(line) for line in file.read_text().splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_BYTES


def test_a_kernel_that_spills_or_is_too_large_is_found() -> None:
    used = {"registers": 255, "shared": 227 * 2**10, "LDL": 0, "STL": 0}
    assert not is_too_large(used)
    for name, value in {"registers": 256, "shared": 228 * 2**10, "LDL": 1, "STL": 1}.items():
        assert is_too_large(used | {name: value})
