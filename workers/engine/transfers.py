"""Copies between the host and the device of a model that neither side waits for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton would compile a second version of a kernel for pointers that are not aligned."""
_TYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")}


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """Return an int64 tensor with these values on the device."""
    return upload_parts([np.array(values, np.int64)], device)[0]


def upload_parts(parts: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, in one copy. Each part is aligned for the kernels."""
    sizes: list[int] = []
    for part in parts:
        # A part, and the bytes up to the next one.
        sizes += part.nbytes, -part.nbytes % ALIGNMENT
    if not any(sizes):
        return [torch.empty(part.shape, dtype=_TYPES[part.dtype], device=device) for part in parts]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host, begin = packed.numpy(), 0
    for part in parts:
        if part.size:
            end = begin + part.nbytes
            host[begin:end].view(part.dtype)[:] = part.ravel()
            begin = end + -end % ALIGNMENT
    on_device = torch.split(packed.to(device, non_blocking=True), sizes)[::2]
    return [
        values.view(_TYPES[part.dtype]).view(part.shape)
        for part, values in zip(parts, on_device, strict=True)
    ]


class Download:
    """A tensor on its way to the host, copied before any later work of the device."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._event: Any = None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> Tensor:
        """Wait for the values, and return them on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.cpu()
