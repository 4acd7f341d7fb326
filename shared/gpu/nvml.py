"""Reads the GPUs of this machine through NVML, the library of NVIDIA's driver.

Containers see the devices that were given to them. NVML needs no CUDA context, so a process that
reads the devices may still fork, and takes no memory on them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from shared.errors import ConfigError, Unavailable
from shared.gpu.devices import Gpu

# Reasons for which a GPU runs below its clock although it has work: power, heat, or the hardware.
THROTTLING = 0x04 | 0x08 | 0x20 | 0x40 | 0x80


class GpuFigures(Struct, frozen=True):
    """Load of a device. Figures that it does not report are None, as for instances of MIG."""

    used_bytes: int
    total_bytes: int
    utilization: float | None
    """Share of the last second in which a kernel ran, from 0 to 1."""
    power_w: float | None
    is_throttled: bool | None
    """Whether power, heat or the hardware keeps the clock down."""
    num_memory_errors: int | None
    """Errors in the memory that could not be corrected, since the driver was loaded."""


@contextmanager
def _library() -> Iterator[Any]:
    """Open the library, and close it at the end. Raises ConfigError and Unavailable."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a GPU requires the extra `gpu`: pip install '.[gpu]' in a checkout",
            field="engine.device",
        ) from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise Unavailable(
            f"NVIDIA's driver does not report devices: {error}; install the driver, or start the"
            " container with GPUs"
        ) from error


def read_gpus() -> list[Gpu]:
    """Return the devices in the order of `nvidia-smi`, with instances in place of divided GPUs.

    Raises ConfigError if the library for NVML is not installed, and Unavailable without a driver.
    """
    with _library() as nvml:
        gpus = []
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            if _is_divided(nvml, handle):
                gpus += [
                    _describe(nvml, instance, f"{number}:{place}")
                    for place, instance in _instances(nvml, handle)
                ]
            else:
                gpus.append(_describe(nvml, handle, str(number)))
        return gpus


def read_figures(uuid: str) -> GpuFigures:
    """Return the load of a device. Raises ConfigError and Unavailable, as `read_gpus`."""
    with _library() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        load = _or_none(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = _or_none(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        reasons = _or_none(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return GpuFigures(
            used_bytes=memory.used,
            total_bytes=memory.total,
            utilization=None if load is None else load.gpu / 100,
            power_w=None if power_mw is None else power_mw / 1000,
            is_throttled=None if reasons is None else bool(reasons & THROTTLING),
            num_memory_errors=_or_none(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds),
        )


def _describe(nvml: Any, handle: Any, index: str) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index,
        nvml.nvmlDeviceGetUUID(handle),
        nvml.nvmlDeviceGetName(handle),
        memory.total,
        memory.free,
    )


def _is_divided(nvml: Any, handle: Any) -> bool:
    modes = _or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return modes is not None and modes[0] == nvml.NVML_DEVICE_MIG_ENABLE


def _instances(nvml: Any, handle: Any) -> Iterator[tuple[int, Any]]:
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        instance = _or_none(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if instance is not None:
            yield place, instance


def _or_none(nvml: Any, read: Any, *arguments: Any) -> Any:
    """Return what a function reads, or None for a figure that the device does not have."""
    try:
        return read(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound):
        return None
