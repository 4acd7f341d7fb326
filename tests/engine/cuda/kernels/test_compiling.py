"""Every kernel compiles and fits into the shared memory of the GPUs that it is meant for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "_attend",
    "_merge_splits",
    "_rms_norm",
    "_silu_mul",
    "_rotate_and_write",
    "_write_cache",
}
# Limit per program: Hopper has 227 KiB, the smaller chips of the Ada generation have 99 KiB.
SHARED_BYTES = 99 * 2**10


@pytest.mark.long
def test_every_kernel_compiles_for_hopper_and_would_fit_elsewhere(tmp_path: Path) -> None:
    # A separate process, because Triton may be set to interpret in this one.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.cuda.kernels.compiling", "90"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    used = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in used} == KERNELS
    assert max(int(shared) for _, shared in used) <= SHARED_BYTES
