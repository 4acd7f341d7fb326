"""Build hook of hatchling: a wheel with compiled kernels is for this kind of machine alone.

`make wheel-kernels` compiles them first. Without them the wheel is for any machine, which compiles
its kernels at the first start.
"""

import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "shared/native/compiled"


class WheelPlatform(BuildHookInterface[Any]):
    """Names the platform, so that pip refuses the wheel where the C library is older."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if any(Path(self.root, FOLDER).glob("*.so")):
            glibc = platform.libc_ver()[1].replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_{glibc}_{platform.machine()}"
