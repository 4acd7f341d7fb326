"""Workers on the GPUs of this machine: their places, their environment, and refusals."""

import asyncio
from pathlib import Path

import pytest

from shared.config.parsing import parse_config
from shared.config.schema import Config
from shared.errors import ConfigError
from shared.gpu.nvml import read_gpus
from tests.support.nvml import DIVIDED, TWO_H100, load_here, record_gpus
from tests.support.waiting import until
from workers.cli.commands.serve import local_cluster
from workers.roles import WorkerSpec, default_workers
from workers.settings import DEMO_MODEL
from workers.supervisor.gpus import WorkerPlaces, describe_gpus, plan_gpus, read_needed_gpus
from workers.supervisor.processes import WorkerProcesses
from workers.supervisor.supervisor import Process, Supervisor

ENGINE = WorkerSpec("engine", "demo")


def config_of(engine: str, rest: str = "") -> Config:
    text = f"models: {{demo: {{path: {DEMO_MODEL}}}}}\nengine: {{{engine}}}\n{rest}"
    return parse_config(text, {}, "test")


@pytest.fixture(autouse=True)
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_here()
    file = tmp_path / "devices"
    monkeypatch.setenv("NVML_RECORD", str(file))
    record_gpus(file, TWO_H100)
    return file


@pytest.mark.parametrize(
    ("engine", "num_engines"),
    [
        ("device: cuda", 1),
        ("device: cuda, devices: [0, 1]", 2),
        ("device: cuda, devices: [GPU-bbbb]", 1),
        ("device: cpu", 1),
    ],
)
def test_each_device_has_a_worker(engine: str, num_engines: int) -> None:
    assert default_workers(config_of(engine)).count(ENGINE) == num_engines


async def test_a_replaced_worker_keeps_its_device_and_a_new_one_gets_the_free_one() -> None:
    started: list[tuple[str | None, Process]] = []

    async def spawn(worker: WorkerSpec) -> Process:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        started.append((worker.device, process))
        return process

    config = config_of("device: cuda, devices: [0, 1]")
    places = WorkerPlaces(config, read_gpus())
    supervisor = Supervisor(spawn, 5.0, lambda worker, code: None, places)
    first = supervisor.add(ENGINE)
    supervisor.add(ENGINE)
    await until(lambda: len(started) == 2)
    started[1][1].kill()
    await until(lambda: len(started) == 3)
    supervisor.drain(first)
    await until(lambda: len(supervisor.slots(ENGINE)) == 1)
    supervisor.add(ENGINE)
    await until(lambda: len(started) == 4)
    await supervisor.stop()
    assert [device for device, _ in started] == ["GPU-aaaa", "GPU-bbbb", "GPU-bbbb", "GPU-aaaa"]


async def test_a_process_sees_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    process = await WorkerProcesses(None)(WorkerSpec("coordinator", device="GPU-bbbb"))
    variables = await asyncio.to_thread(Path(f"/proc/{process.pid}/environ").read_bytes)
    process.kill()
    await process.wait()
    assert b"CUDA_VISIBLE_DEVICES=GPU-bbbb" in variables.split(b"\0")


def test_workers_of_all_roles_share_the_devices() -> None:
    config = config_of(
        "device: cuda, devices: [0, 1], gpu_memory: 0.6",
        "encoder: {device: cuda, devices: [0], gpu_memory: 20 GiB}",
    )
    workers = [ENGINE, ENGINE, WorkerSpec("encoder", "demo"), WorkerSpec("coordinator")]
    planned = plan_gpus(config, workers, read_needed_gpus(config, workers))
    assert [(title, place.gpu.uuid) for title, place in planned] == [
        ("engine demo #1", "GPU-aaaa"),
        ("engine demo #2", "GPU-bbbb"),
        ("encoder demo", "GPU-aaaa"),
    ]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("devices: [0, 7]", r"engine.devices: this machine has no device 7; it has: GPU 0 \("),
        ("gpu_memory: 1.0", "engine.gpu_memory: engine demo takes 85.5 GB of GPU 0 .* 84.4 GB"),
    ],
)
def test_up_refuses_a_plan_that_does_not_fit(engine: str, reason: str) -> None:
    config = config_of(f"device: cuda, {engine}")
    with pytest.raises(ConfigError, match=reason):
        local_cluster(config, None, None, WorkerSpec("gateway"))


def test_up_refuses_a_machine_without_a_driver(devices: Path) -> None:
    devices.unlink()
    with pytest.raises(ConfigError, match=r"engine.device: NVIDIA's driver does not report"):
        local_cluster(config_of("device: cuda"), None, None, WorkerSpec("gateway"))


def test_a_divided_device_is_used_by_its_instances(devices: Path) -> None:
    record_gpus(devices, DIVIDED)
    config = config_of("device: cuda, devices: [mig-1g.5gb]")
    ((_, place),) = plan_gpus(config, [ENGINE], read_gpus())
    assert place.gpu.uuid == "MIG-2222"


def test_places_are_described_where_there_is_a_driver(devices: Path) -> None:
    config = config_of("device: cuda, devices: [1]")
    assert describe_gpus(config) == [
        "engine demo: 77.0 GB of GPU 1 (NVIDIA H100 80GB HBM3, GPU-bbbb)"
    ]
    devices.unlink()
    (line,) = describe_gpus(config)
    assert line.startswith("GPUs were not checked: NVIDIA's driver does not report devices")
    assert describe_gpus(config_of("device: cpu")) == []


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("devices: [0]", "engine.devices: devices are GPUs: set engine.device to cuda"),
        ("device: cuda, devices: [0, '0']", "engine.devices: a device is listed twice"),
        ("device: cuda, gpu_memory: 2", "engine.gpu_memory: 2.0 is neither a share"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(engine: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(engine)
