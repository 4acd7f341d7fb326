"""Recorded devices behind a stand-in for the library of NVIDIA's driver, for pynvml to load."""

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
# As loaders look for it.
NAME = "libnvidia-ml.so.1"

TWO_H100 = (
    "0 GPU-aaaa 81559 1024 35 312000 4 0 NVIDIA H100 80GB HBM3",
    "1 GPU-bbbb 81559 4 0 71000 1 0 NVIDIA H100 80GB HBM3",
)
"""Devices as `nvidia-smi` shows them: a busy one, and an idle one."""
DIVIDED = (
    "0 GPU-cccc 40960 39000 -1 98000 0 1 NVIDIA A100-SXM4-40GB",
    "0:0 MIG-1111 9856 12 -1 0 0 0 NVIDIA A100-SXM4-40GB MIG 2g.10gb",
    "0:2 MIG-2222 4864 12 -1 0 0 0 NVIDIA A100-SXM4-40GB MIG 1g.5gb",
)
"""A device that MIG divides into two instances."""


@functools.cache
def library_folder() -> Path:
    """Compile the stand-in, and return its folder, for LD_LIBRARY_PATH of another process."""
    folder = Path(tempfile.mkdtemp(prefix="nvml-"))
    flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{NAME}"]
    subprocess.run(["cc", *flags, "-o", str(folder / NAME), str(SOURCE)], check=True)
    return folder


def record_gpus(file: Path, devices: Sequence[str]) -> dict[str, str]:
    """Write devices for the stand-in. Return the variables of a process that is to see them."""
    file.write_text("".join(f"{line}\n" for line in devices))
    folder = str(library_folder())
    path = os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")]))
    return {"NVML_RECORD": str(file), "LD_LIBRARY_PATH": path}


def load_here() -> None:
    """Load the stand-in into this process, where the loader finds it by its name."""
    ctypes.CDLL(str(library_folder() / NAME), mode=ctypes.RTLD_GLOBAL)
