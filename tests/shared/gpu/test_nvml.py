"""Devices of this machine through pynvml, over a stand-in for the driver's library."""

from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.gpu.devices import Gpu
from shared.gpu.nvml import GpuFigures, read_figures, read_gpus
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
    assert read_figures("GPU-aaaa") == GpuFigures(1024 * MIB, 81559 * MIB, 0.35, 312.0, True)
    assert read_figures("GPU-bbbb").is_throttled is False
    assert read_figures("MIG-2222") == GpuFigures(12 * MIB, 4864 * MIB, None, None, None)


def test_a_machine_without_a_driver_says_so(devices: Path) -> None:
    with pytest.raises(Unavailable, match="driver does not report devices: Driver Not Loaded"):
        read_gpus()
