"""Kernels that Triton compiles for this process, and the folder that keeps them."""

import os

from triton import knobs

from shared.native.library import cache_folder

FOLDER_VARIABLE = "TRITON_CACHE_DIR"


def keep_kernels() -> None:
    """Keep compiled kernels in the folder of the C++ kernels, unless Triton's variable is set.

    Raises OSError if this user cannot write there.
    """
    if FOLDER_VARIABLE not in os.environ:
        os.environ[FOLDER_VARIABLE] = str(cache_folder() / "triton")


class CompiledKernels:
    """Number of kernels that this process has loaded since this object was made.

    Each of them delays a step: by milliseconds from the cache on disk, and by seconds if it is
    compiled. Only the last object counts.
    """

    def __init__(self) -> None:
        self.num_compiled = 0
        self.num_cached = 0
        knobs.compilation.listener = self._on_loaded

    def _on_loaded(self, *, cache_hit: bool, **details: object) -> None:
        if cache_hit:
            self.num_cached += 1
        else:
            self.num_compiled += 1
