"""Time that steps take on their device, and time that the host waits for it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from shared.telemetry.metrics import Metrics
from workers.engine.model.flat_model import DecoderModel


class Mark(Protocol):
    """A point in the work of a device, such as an event of CUDA."""

    def record(self) -> None:
        """Set the mark after the work that has been launched so far."""

    def query(self) -> bool:
        """Return whether the device has reached the mark."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from this mark to a later one, if both are reached."""


class ProcessorMark:
    """A mark of a device without a queue, such as a processor, which has done all launched work."""

    _at_s = 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "ProcessorMark", /) -> float:
        return 1000 * (end._at_s - self._at_s)


class StepClock:
    """Sums of times since the start, in seconds. All methods are called in the thread of steps."""

    def __init__(self, device: torch.device, new_mark: Callable[[], Mark] | None = None) -> None:
        """`new_mark` makes the marks of the device, by default by its type."""
        # On a processor, the thread computes where it would wait for another device.
        self._computes_itself = device.type == "cpu"
        # Tools run steps on torch's device `meta`, which has no events.
        self._new_mark = new_mark or (_new_event if device.type == "cuda" else ProcessorMark)
        self._unread: deque[tuple[Mark, Mark]] = deque()
        self.device_s = 0.0
        """Time from the first to the last operation of each part of a step, on the device."""
        self.waited_s = 0.0
        """Time in which the thread has waited for the device."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the work that is launched within this context, without a wait for it."""
        start, end = self._new_mark(), self._new_mark()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._unread.append((start, end))
            self._read()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait for results."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            if not self._computes_itself:
                self.waited_s += time.perf_counter() - began_s

    def _read(self) -> None:
        """Add the times of the parts that the device has finished."""
        while self._unread and self._unread[0][1].query():
            start, end = self._unread.popleft()
            seconds = start.elapsed_time(end) / 1000
            self.device_s += seconds
            if self._computes_itself:
                self.waited_s += seconds


def _new_event() -> Mark:
    event: Mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def report_device(metrics: Metrics, model: DecoderModel, clock: StepClock) -> None:
    """Add the times of steps to the metrics of an engine and, on a GPU, its graphs and kernels."""
    metrics.set_function("engine_device_seconds_total", lambda: clock.device_s)
    metrics.set_function("engine_wait_seconds_total", lambda: clock.waited_s)
    if model.device.type != "cuda":
        return
    # Triton need not be installed on a machine without a GPU.
    from workers.engine.cuda.kernels.compilations import CompiledKernels

    kernels = CompiledKernels()
    for name, label, value, read in (
        ("gpu_steps_total", "kind", "graph", lambda: model.num_graph_steps),
        ("gpu_steps_total", "kind", "eager", lambda: model.num_eager_steps),
        ("gpu_graph_rows_total", "kind", "sequence", lambda: model.num_graph_rows),
        ("gpu_graph_rows_total", "kind", "padding", lambda: model.num_padding_rows),
        ("gpu_kernels_loaded_total", "source", "compiler", lambda: kernels.num_compiled),
        ("gpu_kernels_loaded_total", "source", "cache", lambda: kernels.num_cached),
    ):
        metrics.set_function(name, read, **{label: value})
