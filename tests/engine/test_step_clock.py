"""Times of steps on a device that works behind its host, and on a processor."""

from types import SimpleNamespace
from typing import Any

import torch

from shared.telemetry.deltas import samples_of, total
from shared.telemetry.metrics import Metrics
from workers.engine.step_clock import StepClock, report_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Device:
    """A device with a queue of work: it has done the first `done_ms` of it."""

    def __init__(self) -> None:
        self.launched_ms = 0.0
        self.done_ms = 0.0

    def new_mark(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = self._device.launched_ms

    def query(self) -> bool:
        return self._device.done_ms >= self.at_ms

    def elapsed_time(self, end: "Event", /) -> float:
        assert end.query(), "the time of work that is not done is not known"
        return end.at_ms - self.at_ms


def test_the_time_of_a_device_is_counted_when_its_work_is_done() -> None:
    device = Device()
    clock = StepClock(CUDA, device.new_mark)
    for milliseconds in (20.0, 30.0):
        with clock.computing():
            device.launched_ms += milliseconds
        device.launched_ms += 5.0  # work that belongs to no step
    assert clock.device_s == 0.0
    device.done_ms = 45.0
    with clock.computing():
        device.launched_ms += 40.0
    assert clock.device_s == 0.02
    device.done_ms = device.launched_ms
    with clock.computing():
        pass
    assert abs(clock.device_s - 0.09) < 1e-9
    assert clock.waited_s == 0.0
    with clock.waiting():
        sum(range(1000))
    assert clock.waited_s > 0


def test_a_processor_computes_while_it_waits() -> None:
    clock = StepClock(CPU)
    with clock.computing():
        sum(range(1000))
    assert clock.device_s == clock.waited_s > 0
    before = clock.waited_s
    with clock.waiting():
        sum(range(1000))
    assert clock.waited_s == before


def test_an_engine_on_a_gpu_reports_graphs_and_kernels() -> None:
    model: Any = SimpleNamespace(
        device=CUDA, num_graph_steps=3, num_eager_steps=2, num_graph_rows=10, num_padding_rows=6
    )
    metrics = Metrics("engine", "engine-1", "demo")
    report_device(metrics, model, StepClock(CPU))
    samples = samples_of(metrics.snapshot())
    assert total(samples, "gpu_graph_rows_total", kind="padding") == 6
    assert total(samples, "gpu_graph_rows_total") == 16
    assert total(samples, "gpu_steps_total", kind="graph") == 3
    assert total(samples, "gpu_kernels_loaded_total") == 0
    model.num_padding_rows = 7
    assert total(samples_of(metrics.snapshot()), "gpu_graph_rows_total") == 17


def test_an_engine_on_a_processor_reports_its_times_alone() -> None:
    model: Any = SimpleNamespace(device=CPU)
    metrics = Metrics("engine", "engine-1", "demo")
    report_device(metrics, model, StepClock(CPU))
    assert set(samples_of(metrics.snapshot())) == {
        "engine_device_seconds_total",
        "engine_wait_seconds_total",
    }
