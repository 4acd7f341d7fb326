"""Copies between the host and the device of a model that neither side waits for."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton would compile a second version of a kernel for pointers that are not aligned."""


def upload(values: Sequence[Any], device: torch.device, dtype: type = np.int64) -> Tensor:
    """Return a tensor with these values on the device, of NumPy's `dtype`."""
    return upload_parts([np.array(values, dtype)], device)[0]


def upload_parts(parts: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, in one copy. Each part is aligned for the kernels."""
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    offsets = [0, *accumulate(sizes)]
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for part, offset in zip(parts, offsets, strict=False):
        host[offset : offset + part.nbytes].view(part.dtype)[:] = part.ravel()
    on_device = packed.to(device, non_blocking=True)
    return [
        on_device[offset : offset + part.nbytes]
        .view(getattr(torch, part.dtype.name))
        .view(part.shape)
        for part, offset in zip(parts, offsets, strict=False)
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
