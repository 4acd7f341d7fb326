"""Part of a device's memory: a share of all memory, such as 0.9, or a size, such as `20 GiB`."""

import re
from typing import TypeAlias

GpuMemory: TypeAlias = float | str
DEFAULT = 0.9

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(MB|GB|MiB|GiB)")
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def fault_of_memory(value: GpuMemory) -> str | None:
    """Return why a value is neither a share nor a size, or None."""
    if isinstance(value, str):
        size = _SIZE.fullmatch(value)
        is_valid = size is not None and float(size[1]) > 0
    else:
        is_valid = 0 < value <= 1
    if is_valid:
        return None
    return f"{value!r} is neither a share above 0 and up to 1 nor a size such as '20 GiB'"


def memory_bytes(value: GpuMemory, total_bytes: int) -> int:
    """Return the bytes that a valid value means on a device with `total_bytes`."""
    if isinstance(value, str):
        size = _SIZE.fullmatch(value)
        assert size is not None
        return round(float(size[1]) * _UNITS[size[2]])
    return int(value * total_bytes)
