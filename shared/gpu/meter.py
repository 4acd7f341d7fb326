"""Metrics of the GPU on which a worker computes."""

import os
import time
from collections.abc import Callable

import structlog

from shared.config.schema import DeviceConfig
from shared.errors import PagemillError
from shared.gpu.devices import VISIBLE_DEVICES, Gpu
from shared.gpu.nvml import GpuFigures, read_figures, read_gpus
from shared.telemetry.metrics import Metrics

MAX_AGE_S = 1.0
"""Age after which figures are read again."""

_FIGURES: dict[str, Callable[[GpuFigures], float | None]] = {
    "gpu_memory_used_bytes": lambda figures: figures.used_bytes,
    "gpu_memory_total_bytes": lambda figures: figures.total_bytes,
    "gpu_utilization": lambda figures: figures.utilization,
    "gpu_power_watts": lambda figures: figures.power_w,
    "gpu_throttled": lambda figures: figures.is_throttled,
    "gpu_memory_errors_total": lambda figures: figures.num_memory_errors,
}


class GpuMeter:
    """Figures of one device, read at most once a second."""

    def __init__(self, gpu: Gpu) -> None:
        """Raises Unavailable if the driver does not report the device."""
        self._uuid = gpu.uuid
        self._figures = read_figures(gpu.uuid)
        self._read_s = time.monotonic()

    def register(self, metrics: Metrics) -> None:
        """Add the figures that the device has to the metrics of the worker."""
        for name, choose in _FIGURES.items():
            if choose(self._figures) is not None:
                read = self._reader(choose)
                metrics.set_function(name, read, gpu=self._uuid)

    def _reader(self, choose: Callable[[GpuFigures], float | None]) -> Callable[[], float]:
        return lambda: float(choose(self._current()) or 0)

    def _current(self) -> GpuFigures:
        if time.monotonic() - self._read_s > MAX_AGE_S:
            self._read_s = time.monotonic()
            try:
                self._figures = read_figures(self._uuid)
            except PagemillError as error:
                structlog.get_logger().warning("gpu_not_read", reason=error.message)
        return self._figures


def find_own_gpu() -> Gpu | None:
    """Return the first device that CUDA lets this process see, or None if it is not known."""
    gpus = read_gpus()
    first = os.environ.get(VISIBLE_DEVICES, "0").partition(",")[0].strip()
    return next((gpu for gpu in gpus if first in (gpu.uuid, gpu.index)), None)


def measure_gpu(settings: DeviceConfig, metrics: Metrics) -> None:
    """Add metrics of the device of this worker, if it computes on one that NVML reports."""
    if settings.device == "cpu":
        return
    try:
        if (gpu := find_own_gpu()) is not None:
            GpuMeter(gpu).register(metrics)
    except PagemillError as error:
        structlog.get_logger().warning("gpu_not_read", reason=error.message)
