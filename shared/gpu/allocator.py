"""Limit on the memory of a worker on its GPU."""

import torch

from shared.config.gpu_memory import memory_bytes
from shared.config.schema import DeviceConfig


def limit_memory(settings: DeviceConfig) -> int | None:
    """Limit the allocator of this process to `gpu_memory`, and return the limit in bytes.

    Returns None, and changes nothing, for a worker that computes on the processor.
    """
    if torch.device(settings.device).type != "cuda":
        return None
    total = torch.cuda.mem_get_info()[1]
    limit = min(total, memory_bytes(settings.gpu_memory, total))
    torch.cuda.set_per_process_memory_fraction(limit / total)
    return limit
