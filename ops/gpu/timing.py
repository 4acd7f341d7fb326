"""Time of a call on a device, the device's ceilings, and the share of time in which it is idle."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.profiler import DeviceType

NUM_WARM_UPS = 3
# Calls in one recorded graph, so that the time of a launch does not count as a kernel's.
NUM_CALLS = 10
NUM_REPEATS = 15


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call; on CUDA within a graph, between events."""
    if device.type != "cuda":
        return _time_on_cpu(call)
    for _ in range(NUM_WARM_UPS):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_CALLS):
            call()
    graph.replay()
    seconds: list[float] = []
    for _ in range(NUM_REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3 / NUM_CALLS)
    return median(seconds)


def _time_on_cpu(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy within the device's memory."""
    num_bytes = 2**20 if device.type == "cpu" else 2**32
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / time_call(lambda: target.copy_(source), device)


def matrix_rate(device: torch.device) -> float:
    """Return the operations per second of a large product in bfloat16, on random data."""
    size = 64 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_call(lambda: a @ b, device)


def idle_share(busy: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end that no interval covers."""
    if not busy:
        return 1.0
    ordered = sorted(busy)
    first, reached = ordered[0][0], ordered[0][0]
    idle = 0.0
    for began, ended in ordered:
        idle += max(0.0, began - reached)
        reached = max(reached, ended)
    return idle / (reached - first) if reached > first else 0.0


def watch_device(run: Callable[[], object]) -> float:
    """Return the idle share of the GPU during a call, from the profiler's record of its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = (e for e in profile.events() if e.device_type == DeviceType.CUDA)
    return idle_share([(e.time_range.start, e.time_range.end) for e in kernels])
