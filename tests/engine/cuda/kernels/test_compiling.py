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
    "_prepare",
    "_sum_units",
    "_choose",
    "_choose_filtered",
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
    assert f"compiled {len(kernels)}, from the cache 0" in done.stdout
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_BYTES


DRIVER = """
import re, subprocess, sys
from pathlib import Path
from triton.backends.nvidia import driver

# The functions of the driver, which comes with a card.
names = set(re.findall(r"\\b(cu[A-Z]\\w+)\\(", (Path(driver.dirname) / "driver.c").read_text()))
source = Path(sys.argv[1]) / "cuda.c"
source.write_text("".join(f"int {name}(void) {{ return 1; }}\\n" for name in sorted(names)))
library = source.with_name("libcuda.so.1")
subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
driver.CudaUtils()
"""


def test_the_launcher_of_triton_compiles_where_there_is_no_card(tmp_path: Path) -> None:
    """As in the image for GPUs, with gcc and the headers of Python and Triton."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "cache").glob("*/cuda_utils*.so"))


def test_a_kernel_that_spills_or_is_too_large_is_found() -> None:
    used = {"registers": 255, "shared": 227 * 2**10, "LDL": 0, "STL": 0}
    assert not is_too_large(used)
    for name, value in {"registers": 256, "shared": 228 * 2**10, "LDL": 1, "STL": 1}.items():
        assert is_too_large(used | {name: value})
