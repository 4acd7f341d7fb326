"""Processes that are forked from a preloader: how they start, and how each of them may end."""

import asyncio
import gc
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.helpers.forking import fork
from tests.support.waiting import until
from workers.supervisor.preloader import ForkedProcess, Preloader, Start, encode

ROOT = Path(__file__).parents[2]
# The first argument of a forked process selects its behaviour.
SCRIPT = """
import os, signal, socket, sys, tempfile, time
from workers.supervisor.preloader import serve

tempfile.gettempdir()

def main():
    print("started", flush=True, file=sys.stderr)
    match sys.argv[1]:
        case "exit": sys.exit(int(sys.argv[2]))
        case "fail": raise ValueError("a mistake")
        case "say": print(os.getcwd(), tempfile.gettempdir(), dict(os.environ), file=sys.stderr)
        case "modules": print("colorsys" in sys.modules, file=sys.stderr)
        case "group": print(os.getpgid(0) == os.getpid(), file=sys.stderr)
        case "session": print(os.getsid(0) == int(sys.argv[2]), file=sys.stderr)
        case "drain":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            print("ready", flush=True, file=sys.stderr)
            time.sleep(600)
        case "wait": time.sleep(600)

def refuse(*_):
    raise BlockingIOError(11, "Resource temporarily unavailable")

if fault := sys.argv[3:]:
    setattr(os, fault[0], refuse)
try:
    serve(socket.socket(fileno=int(sys.argv[1])), [sys.argv[2]], main)
except Exception:
    # The supervisor's own handlers are below `serve` in the stack.
    print("handled as the preloader's own", file=sys.stderr)
"""


class Served:
    """A preloader, and the process that runs `serve`."""

    def __init__(self, log: Path, *fault: str, module: str = "colorsys") -> None:
        """`fault` is a function of `os` that Linux refuses."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", SCRIPT, str(theirs.fileno()), module, *fault]
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(log.parent)},
                pass_fds=[theirs.fileno()],
                stderr=stderr,
            )
        theirs.close()
        self.preloader = Preloader(ours, self.process.pid)
        self.log = log

    async def start(
        self, *arguments: str, env: dict[str, str] | None = None, folder: str | None = None
    ) -> ForkedProcess:
        with self.log.open("ab") as stderr:
            return await self.preloader.start(
                arguments, stderr=stderr.fileno(), env=env, folder=folder
            )

    async def printed(self, text: str) -> None:
        await until(lambda: text in self.log.read_text())


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    running = Served(tmp_path / "log")
    yield running
    running.preloader.close()
    running.process.wait()


def has_ended(pid: int) -> bool:
    """Whether a process that is no child of ours has ended, or is a zombie."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_exit_codes_and_signals_are_reported(served: Served) -> None:
    codes = [await (await served.start("exit", code)).wait() for code in ("0", "78")]
    assert codes == [0, 78]
    assert await (await served.start("fail")).wait() == 1
    await served.printed("ValueError: a mistake")
    waiting = [await served.start("wait") for _ in range(2)]
    waiting[0].kill()
    waiting[1].terminate()
    assert [await process.wait() for process in waiting] == [-signal.SIGKILL, -signal.SIGTERM]


async def test_a_process_has_the_modules_and_a_separate_group(served: Served) -> None:
    for question in ("modules", "group"):
        await (await served.start(question)).wait()
    assert served.log.read_text().split() == ["started", "True"] * 2


async def test_a_process_is_in_the_session_of_the_supervisor(served: Served) -> None:
    """Only so does Linux compare the niceness of all workers of `pagemill up`."""
    await (await served.start("session", str(os.getsid(0)))).wait()
    assert served.log.read_text().split() == ["started", "True"]


async def test_environment_folder_and_temporary_files(served: Served, tmp_path: Path) -> None:
    env = {"ONLY": "this", "TMPDIR": str(tmp_path)}
    await (await served.start("say", env=env, folder=str(tmp_path))).wait()
    assert f"{tmp_path} {tmp_path} {env}" in served.log.read_text()


async def test_signals_of_a_process_group_are_for_the_workers_alone(served: Served) -> None:
    """A service manager sends SIGTERM to all processes of a service."""
    worker = await served.start("drain")
    await served.printed("ready")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        served.process.send_signal(number)
    assert await (await served.start("exit", "3")).wait() == 3
    worker.terminate()
    assert await worker.wait() == 7


async def test_a_killed_preloader_ends_its_processes(served: Served) -> None:
    worker = await served.start("drain")
    await served.printed("ready")
    served.process.kill()
    assert await worker.wait() == -signal.SIGTERM
    await until(lambda: has_ended(worker.pid))
    with pytest.raises(ConnectionError):
        await served.start("exit", "0")


async def test_a_start_fails_when_the_preloader_dies_before_its_answer(served: Served) -> None:
    await (await served.start("exit", "0")).wait()
    served.process.send_signal(signal.SIGSTOP)
    starting = asyncio.create_task(served.start("wait"))
    await asyncio.sleep(0)
    served.process.kill()
    with pytest.raises(ConnectionError):
        await starting


async def test_a_cancelled_start_leaves_no_error(served: Served) -> None:
    """Ctrl-C in a terminal ends the supervisor and its preloader at the same time."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    await (await served.start("exit", "0")).wait()
    served.process.send_signal(signal.SIGSTOP)
    starting = asyncio.create_task(served.start("wait"))
    await asyncio.sleep(0)
    starting.cancel()
    served.process.kill()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: len(asyncio.all_tasks()) == 1)
    del starting
    gc.collect()
    assert not errors


async def test_everything_ends_with_the_supervisor(served: Served) -> None:
    worker = await served.start("drain")
    await served.printed("ready")
    served.preloader.close()
    assert served.preloader.has_ended
    await until(lambda: has_ended(worker.pid))
    with pytest.raises(ProcessLookupError):
        os.kill(served.process.pid, 0)


@pytest.mark.parametrize("function", ["fork", "pidfd_open"])
async def test_a_fork_that_linux_refuses_fails_alone(function: str, tmp_path: Path) -> None:
    served = Served(tmp_path / "log", function)
    try:
        with pytest.raises(BlockingIOError):
            await served.start("wait")
        folder = f"/proc/{served.process.pid}/fd"
        num_open = len(os.listdir(folder))
        with pytest.raises(BlockingIOError):
            await served.start("wait")
        assert children_of(served.process.pid) == []
        # The server closes its end of a report after it has sent the error.
        await until(lambda: len(os.listdir(folder)) <= num_open)
    finally:
        served.preloader.close()
        served.process.wait()


async def test_an_error_in_a_forked_process_does_not_reach_the_preloaders_code(
    served: Served, tmp_path: Path
) -> None:
    assert await (await served.start("fail")).wait() == 1
    missing = tmp_path / "missing"
    assert await (await served.start("say", folder=str(missing))).wait() == 1
    await served.printed(f"No such file or directory: '{missing}'")
    assert "handled" not in served.log.read_text()
    assert await (await served.start("exit", "3")).wait() == 3


def test_the_end_of_the_supervisor_is_no_error_of_the_preloader(tmp_path: Path) -> None:
    """Linux resets a connection whose other end is closed with events that were not read."""
    served = Served(tmp_path / "log")
    channel = served.preloader._channel
    with served.log.open("ab") as stderr:
        report = fork(channel, encode(Start(["exit", "0"])), [stderr.fileno()])
    select.select([report], [], [], 60)
    report.close()
    channel.close()
    assert served.process.wait(60) == 0
    assert "handled" not in served.log.read_text()


async def test_a_preloader_that_imports_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    served = Served(tmp_path / "log", module="slow")
    try:
        await asyncio.wait_for(asyncio.to_thread(served.preloader.close), 10)
    finally:
        served.process.kill()
        served.process.wait()
