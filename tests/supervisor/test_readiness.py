"""Waiting for workers at a real broker, and Linux's figures of their processes."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.bus.bus import Bus
from shared.bus.connection import BROKER_DEADLINE_S
from shared.bus.embedded_server import EmbeddedServer
from shared.errors import Unavailable
from shared.helpers.process_usage import Usage, usage_of
from shared.protocol.encoding import to_json
from shared.protocol.messages import BlobAddress, Heartbeat, StartReport
from workers.roles import WorkerSpec
from workers.supervisor.start import Quiet, read_signs, wait_ready

ENGINE = WorkerSpec("engine", "demo")


class Process:
    """A process that sleeps. The test reports for it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self.returncode: int | None = None


@pytest.fixture
def sleeper() -> Iterator[Process]:
    process = subprocess.Popen(["sleep", "600"])
    yield Process(process)
    process.kill()
    process.wait()


class Recorder(Quiet):
    def __init__(self) -> None:
        self.texts: asyncio.Queue[str] = asyncio.Queue()

    def progress(self, title: str, text: str) -> None:
        self.texts.put_nowait(f"{title}: {text}")


async def test_progress_is_shown_until_the_first_heartbeat(bus: Bus, sleeper: Process) -> None:
    recorder = Recorder()
    waiting = asyncio.create_task(wait_ready(bus, [ENGINE], {0: sleeper}.get, 600, recorder))
    report = StartReport("engine", "engine-s", "0", sleeper.pid, "compiling kernels", "demo")
    await bus.heartbeats.publish_start("engine-s", to_json(report))
    while await recorder.texts.get() != "engine demo: compiling kernels":
        pass
    # The gateway of another cluster may have the same process id on its machine.
    other = Heartbeat("gateway", "gateway-s", "0", sleeper.pid, ["demo"], {})
    await bus.heartbeats.publish("gateway-s", to_json(other))
    beat = Heartbeat("engine", "engine-s", "0", sleeper.pid, ["demo"], {})
    await bus.heartbeats.publish("engine-s", to_json(beat))
    assert await waiting == [beat]


async def test_a_broker_without_streams_has_no_signs_and_answers_at_once(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, 0)
    await asyncio.to_thread(server.start)
    bus = await Bus.connect(server.url, "test")
    try:
        async with asyncio.timeout(BROKER_DEADLINE_S / 2):
            assert await read_signs(bus) == ([], [])
    finally:
        await bus.close()
        await asyncio.to_thread(server.stop)


async def test_a_worker_of_another_machine_with_the_same_process_id_is_not_ours(
    bus: Bus, sleeper: Process
) -> None:
    foreign = BlobAddress("another machine", "pagemill-x")
    other = Heartbeat("engine", "engine-o", "0", sleeper.pid, ["demo"], {}, blobs=foreign)
    await bus.heartbeats.publish("engine-o", to_json(other))
    with pytest.raises(Unavailable):
        await wait_ready(bus, [ENGINE], {0: sleeper}.get, 0.1, Quiet())
    own = Heartbeat("engine", "engine-s", "0", sleeper.pid, ["demo"], {})
    await bus.heartbeats.publish("engine-s", to_json(own))
    gateway = Heartbeat("gateway", "gateway-o", "0", sleeper.pid, ["demo"], {})
    await bus.heartbeats.publish("gateway-o", to_json(gateway))
    assert await wait_ready(bus, [ENGINE], {0: sleeper}.get, 1.0, Quiet()) == [own]


async def test_progress_of_another_role_with_the_same_process_id_is_not_ours(
    bus: Bus, sleeper: Process
) -> None:
    for role, step in (("renderer", "loading tokenizers"), ("engine", "compiling kernels")):
        report = StartReport(role, f"{role}-p", "0", sleeper.pid, step)
        await bus.heartbeats.publish_start(f"{role}-p", to_json(report))
    with pytest.raises(Unavailable, match=r"engine demo \(last: compiling kernels\)"):
        await wait_ready(bus, [ENGINE], {0: sleeper}.get, 0.1, Quiet())


async def test_silence_ends_the_start(bus: Bus, sleeper: Process) -> None:
    with pytest.raises(Unavailable, match=r"0\.1 s \(start_silence_s\): engine demo"):
        await wait_ready(bus, [ENGINE], {0: sleeper}.get, 0.1, Quiet())


def test_processor_time_of_children_counts(tmp_path: Path) -> None:
    """A compiler is a child of the worker, which waits for it."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        while usage_of(process.pid).cpu_s < 0.5:
            assert process.poll() is None
        assert _own_cpu_s(process.pid) < usage_of(process.pid).cpu_s
    finally:
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        process.wait()


def _own_cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / 100
    return 0.0


def test_a_process_that_has_ended_uses_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert usage_of(process.pid) == Usage()
