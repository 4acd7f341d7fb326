"""Workers of a supervisor: restarts, refusals and drain."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.stage.runtime import EXIT_CONFIG
from tests.support.waiting import until
from workers.roles import WorkerSpec
from workers.supervisor import supervisor as supervisor_module
from workers.supervisor.preloader import ForkedProcess
from workers.supervisor.processes import WorkerProcesses
from workers.supervisor.supervisor import Process, Supervisor

ENGINE = WorkerSpec("engine", "demo")


def ended(code: int) -> ForkedProcess:
    process = ForkedProcess(1)
    process.end(code)
    return process


class Starts:
    """A `Spawn` with the result of each start; then all processes run."""

    def __init__(self, *results: Process | OSError) -> None:
        self._results = list(results)
        self.count = 0

    async def __call__(self, worker: WorkerSpec) -> Process:
        self.count += 1
        if not self._results:
            return await asyncio.create_subprocess_exec("sleep", "60")
        match self._results.pop(0):
            case OSError() as error:
                raise error
            case process:
                return process


@pytest.fixture(autouse=True)
def fast_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_S", 0.001)


async def test_a_process_that_linux_refuses_is_tried_again() -> None:
    refusal = BlockingIOError(11, "Resource temporarily unavailable")
    starts = Starts(refusal, OSError(12), ended(1))
    supervisor = Supervisor(starts, 1.0, lambda worker, code: None)
    with capture_logs() as logs:
        slot = supervisor.add(ENGINE)
        await until(lambda: supervisor.pids("engine"))
        await supervisor.stop()
    assert [(log["event"], log["role"]) for log in logs] == [
        ("worker_not_started", "engine"),
        ("worker_not_started", "engine"),
        ("worker_ended", "engine"),
    ]
    assert "Resource temporarily unavailable" in logs[0]["reason"]
    assert logs[1]["retry_in_s"] == 2 * logs[0]["retry_in_s"]
    assert (slot, starts.count) == (0, 4)


async def test_each_end_is_reported_and_the_worker_is_started_again() -> None:
    ends: list[tuple[WorkerSpec, int]] = []
    starts = Starts(ended(1), ended(EXIT_CONFIG))
    supervisor = Supervisor(starts, 1.0, lambda worker, code: ends.append((worker, code)))
    supervisor.add(ENGINE)
    await until(lambda: supervisor.pids("engine"))
    await supervisor.stop()
    assert ends == [(ENGINE, 1), (ENGINE, EXIT_CONFIG)]


async def test_a_worker_that_hangs_in_its_drain_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.0)

    async def spawn(worker: WorkerSpec) -> Process:
        script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=pipe)
        assert process.stdout is not None
        await process.stdout.readline()
        return process

    supervisor = Supervisor(spawn, 0.1, lambda worker, code: None)
    slot = supervisor.add(ENGINE)
    await until(lambda: supervisor.pids("engine"))
    process = supervisor.processes[slot]
    supervisor.drain(slot)
    assert [running.draining for running in supervisor.slots(ENGINE)] == [True]
    assert await process.wait() == -9
    await until(lambda: not supervisor.slots(ENGINE))
    await supervisor.stop()


async def test_only_its_owner_can_read_a_log_that_a_worker_begins(tmp_path: Path) -> None:
    log_file = tmp_path / "logs" / "workers.log"
    spawn = WorkerProcesses(None, "nats://127.0.0.1:9", log_file)
    process = await spawn(WorkerSpec("coordinator"))
    process.kill()
    await process.wait()
    assert log_file.stat().st_mode & 0o777 == 0o600
