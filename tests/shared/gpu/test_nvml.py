"""Devices of this machine through pynvml, over a stand-in for the driver's library."""

from pathlib import Path

import pytest

from shared.config.schema import EngineConfig
from shared.errors import Unavailable
from shared.gpu import meter
from shared.gpu.devices import Gpu
from shared.gpu.meter import measure_gpu
from shared.gpu.nvml import GpuFigures, read_figures, read_gpus
from shared.telemetry.metrics import Metrics
from tests.support.nvml import DIVIDED, TWO_H100, load_here, record_gpus

MIB = 2**20


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_here()
    file = tmp_path / "devices"
    monkeypatch.setenv("NVML_RECORD", str(file))
    return file


def test_devices_have_the_numbers_of_nvidia_smi_and_their_free_memory(devices: Path) -> None:
    record_gpus(devices, TWO_H100)
    assert read_gpus() == [
        Gpu("0", "GPU-aaaa", "NVIDIA H100 80GB HBM3", 81559 * MIB, 80535 * MIB),
        Gpu("1", "GPU-bbbb", "NVIDIA H100 80GB HBM3", 81559 * MIB, 81555 * MIB),
    ]


def test_instances_take_the_place_of_a_divided_device(devices: Path) -> None:
    record_gpus(devices, DIVIDED)
    assert [(gpu.index, gpu.uuid) for gpu in read_gpus()] == [
        ("0:0", "MIG-1111"),
        ("0:2", "MIG-2222"),
    ]


def test_figures_of_a_device_and_of_an_instance(devices: Path) -> None:
    record_gpus(devices, [*TWO_H100, *DIVIDED[1:]])
    # The power limit slows down the first one; the second one is idle.
    assert read_figures("GPU-aaaa") == GpuFigures(1024 * MIB, 81559 * MIB, 0.35, 312.0, True, 4)
    assert read_figures("GPU-bbbb").is_throttled is False
    assert read_figures("MIG-2222") == GpuFigures(12 * MIB, 4864 * MIB, None, None, None, None)


def test_a_worker_reports_its_device(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_gpus(devices, TWO_H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb,GPU-aaaa")
    monkeypatch.setattr(meter, "MAX_AGE_S", 0.0)
    metrics = Metrics("engine", "engine-1", "demo")
    measure_gpu(EngineConfig(device="cuda"), metrics)
    assert values_of(metrics) == {
        "gpu_memory_errors_total": 4.0,
        "gpu_memory_total_bytes": 81559 * MIB,
        "gpu_memory_used_bytes": 4 * MIB,
        "gpu_power_watts": 71.0,
        "gpu_throttled": 0.0,
        "gpu_utilization": 0.0,
    }
    record_gpus(devices, [TWO_H100[0], TWO_H100[1].replace(" 0 71000 1 ", " 90 300000 64 ")])
    assert values_of(metrics)["gpu_utilization"] == 0.9
    assert values_of(metrics)["gpu_throttled"] == 1.0
    # The last figures stay while the driver does not answer.
    devices.unlink()
    assert values_of(metrics)["gpu_power_watts"] == 300.0


def test_an_instance_reports_its_memory_alone(
    devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_gpus(devices, DIVIDED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    metrics = Metrics("engine", "engine-1", "demo")
    measure_gpu(EngineConfig(device="cuda"), metrics)
    assert values_of(metrics).keys() == {"gpu_memory_total_bytes", "gpu_memory_used_bytes"}


def test_workers_without_a_known_device_report_none(devices: Path) -> None:
    metrics = Metrics("engine", "engine-1", "demo")
    measure_gpu(EngineConfig(device="cpu"), metrics)
    measure_gpu(EngineConfig(device="cuda"), metrics)
    assert values_of(metrics) == {}


def values_of(metrics: Metrics) -> dict[str, float]:
    return {series.name: series.value for series in metrics.snapshot().series}


def test_a_machine_without_a_driver_says_so(devices: Path) -> None:
    with pytest.raises(Unavailable, match="Driver Not Loaded; install the driver, or start"):
        read_gpus()
