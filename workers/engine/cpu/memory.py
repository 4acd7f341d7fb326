"""Memory of the kernels, in huge pages where the system has them."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any


def allocate(kernels: ctypes.CDLL, num_bytes: int) -> "ctypes.Array[ctypes.c_byte]":
    """Return zeroed memory, which is freed when the array is collected. Raises MemoryError."""
    address: int | None = kernels.pagemill_allocate(num_bytes)
    if address is None:
        raise MemoryError(f"cannot allocate {num_bytes} bytes for weights or cache")
    memory = (ctypes.c_byte * num_bytes).from_address(address)
    on_collect(memory, kernels.pagemill_free, address, num_bytes)
    return memory


def on_collect(owner: Any, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function` when the owner is collected, but not at exit: a step may be running then."""
    weakref.finalize(owner, function, *arguments).atexit = False
