"""Processes that are forked from a preloader: how they start, and how each of them may end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from workers.cli.preloader import ForkedProcess, Preloader

ROOT = Path(__file__).parents[2]
# What a forked process does is its first argument.
SCRIPT = """
import os, signal, socket, sys, tempfile, time
from workers.cli.preloader import serve

tempfile.gettempdir()

def main():
    print("started", flush=True, file=sys.stderr)
    match sys.argv[1]:
        case "exit": sys.exit(int(sys.argv[2]))
        case "fail": raise ValueError("a mistake")
        case "say": print(os.getcwd(), tempfile.gettempdir(), dict(os.environ), file=sys.stderr)
        case "modules": print("colorsys" in sys.modules, file=sys.stderr)
        case "session": print(os.getsid(0) == os.getpid(), file=sys.stderr)
        case "drain":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            print("ready", flush=True, file=sys.stderr)
            time.sleep(600)
        case "wait": time.sleep(600)

serve(socket.socket(fileno=int(sys.argv[1])), ["colorsys"], main)
"""


class Served:
    """A preloader, and the process that runs `serve`."""

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", SCRIPT, str(theirs.fileno())]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process that is no child of ours has ended; nobody may have waited for it."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


async def test_exit_codes_and_signals_are_reported(served: Served) -> None:
    codes = [await (await served.start("exit", code)).wait() for code in ("0", "78")]
    assert codes == [0, 78]
    assert await (await served.start("fail")).wait() == 1
    await served.printed("ValueError: a mistake")
    waiting = [await served.start("wait") for _ in range(2)]
    waiting[0].kill()
    waiting[1].terminate()
    assert [await process.wait() for process in waiting] == [-signal.SIGKILL, -signal.SIGTERM]


async def test_a_process_has_the_modules_and_a_session_of_its_own(served: Served) -> None:
    for question in ("modules", "session"):
        await (await served.start(question)).wait()
    assert served.log.read_text().split() == ["started", "True"] * 2


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


async def test_everything_ends_with_the_supervisor(served: Served) -> None:
    worker = await served.start("drain")
    await served.printed("ready")
    served.preloader.close()
    assert served.preloader.has_ended
    await until(lambda: has_ended(worker.pid))
    with pytest.raises(ProcessLookupError):
        os.kill(served.process.pid, 0)
