"""Limit on the memory of a worker on its GPU."""

import torch

from shared.config.gpu_memory import memory_bytes
from shared.config.schema import DeviceConfig
from shared.errors import ConfigError


def limit_memory(settings: DeviceConfig) -> int | None:
    """Limit the allocator of this process to `gpu_memory`, and return the limit in bytes.

    Returns None, and changes nothing, for a worker that computes on the processor. Raises
    ConfigError if torch finds no GPU.
    """
    if settings.device == "cpu":
        return None
    if not torch.cuda.is_available():
        build = "finds no GPU" if torch.version.cuda else "is a build without CUDA"
        raise ConfigError(
            f"device: it is {settings.device}, but torch {build}: run `make install` on a machine"
            " with an NVIDIA GPU, or set the device to cpu",
            field="device",
        )
    total = torch.cuda.mem_get_info()[1]
    limit = min(total, memory_bytes(settings.gpu_memory, total))
    torch.cuda.set_per_process_memory_fraction(limit / total)
    return limit
