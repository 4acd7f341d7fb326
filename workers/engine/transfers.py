"""Copies between the host and the device of a model that neither side waits for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device, dtype: type = np.int64) -> Tensor:
    """Return a tensor with these values on the device, of NumPy's `dtype`."""
    # NumPy converts lists in a fraction of torch's time.
    return send(torch.from_numpy(np.array(values, dtype=dtype)), device)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device, without waiting for the device's work."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


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
        """Wait for the values, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
