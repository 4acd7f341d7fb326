"""Commands of Pagemill as forks of one process with all modules in memory.

Tests start a hundred workers and clusters. The imports of each would take one to five seconds of
processor time, the longest part of a run. `tests.preloading` imports them once, and forks for each
connection a preloader of `pagemill up`, with the whole command line as what it forks. The processes
of pytest-xdist share it, and are forks of a fork that has collected the tests: each of them would
take 15 s to import and compile the same modules.
"""

import atexit
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from workers.supervisor import preloader
from workers.supervisor.preloader import MAX_MESSAGE_BYTES, Event, Exited, Start, Started

ROOT = Path(__file__).parent.parent
# Environment variable with the path of the preloader's socket.
ADDRESS = "TESTS_PRELOADER"
# Environment variable that names a module whose `register_roles` a command calls first.
ROLES_OF = "TESTS_ROLES_OF"
# Environment variable that names an interpreter for the workers that `pagemill up` does not fork.
PYTHON_OF = "TESTS_PYTHON_OF_WORKERS"
# An interpreter with the options -m and -c, whose programs are forks in runs of pytest-xdist.
PYTHON = [sys.executable, "-IS", str(ROOT / "tests" / "forked_python.py")]
# One whose programs have the modules of the tests in memory too.
COLLECTED_PYTHON = [*PYTHON, "--collected"]


def write_python(file: Path) -> None:
    """Write a command that is used like PYTHON where one path is expected."""
    file.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    file.chmod(0o755)


class ForkedCommand:
    """A running command; it is used like `subprocess.Popen`."""

    def __init__(self, forks: "_Forks", pid: int) -> None:
        self.pid = pid
        self._forks = forks

    @property
    def returncode(self) -> int | None:
        return self._forks.codes.get(self.pid)

    def poll(self) -> int | None:
        self._forks.read_exits()
        return self.returncode

    def wait(self, timeout_s: float = 600.0) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("pagemill", timeout_s)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forks:
    """A connection to the preloader, and the exit codes that came over it."""

    def __init__(self, address: str) -> None:
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.connect(address)
        self._channel.send(b"-")
        self._lock = threading.Lock()
        self.codes: dict[int, int] = {}

    def start(
        self, arguments: list[str], cwd: Path, env: Mapping[str, str], outputs: list[IO[bytes]]
    ) -> ForkedCommand:
        start = Start(arguments, dict(env), str(cwd))
        with self._lock:
            socket.send_fds(
                self._channel, [preloader.encode(start)], [file.fileno() for file in outputs]
            )
            while not isinstance(event := self._receive(), Started):
                assert isinstance(event, Exited), f"no process: {event}"
                self.codes[event.pid] = event.code
            self.codes.pop(event.pid, None)
            return ForkedCommand(self, event.pid)

    def read_exits(self) -> None:
        with self._lock:
            self._channel.setblocking(False)
            try:
                while isinstance(event := self._receive(), Exited):
                    self.codes[event.pid] = event.code
            except BlockingIOError:
                pass
            finally:
                self._channel.setblocking(True)

    def _receive(self) -> Event:
        message = self._channel.recv(MAX_MESSAGE_BYTES)
        assert message, "the preloader of the tests has ended"
        event: Event = preloader.decode_event(message)
        return event


_running: _Forks | None = None


def serve(collecting: Sequence[str] | None = None) -> str:
    """Start the preloader, unless a parent process has done it, and return its address.

    With arguments of pytest that select tests, a fork of it collects these, and serves
    COLLECTED_PYTHON.
    """
    if ADDRESS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="pagemill-tests-")
        os.environ[ADDRESS] = str(Path(folder.name) / "preloader")
        with contextlib.ExitStack() as stack:
            listeners = []
            for suffix in ("",) if collecting is None else ("", "-collected"):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listeners.append(stack.enter_context(listener).fileno())
                listener.bind(os.environ[ADDRESS] + suffix)
                listener.listen()
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.preloading",
                    ",".join(map(str, listeners)),
                    *(collecting or ()),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=listeners,
                start_new_session=True,
            )
        atexit.register(_stop, process, folder)
    return os.environ[ADDRESS]


def _stop(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    folder.cleanup()


def start(
    arguments: Sequence[str],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] = os.environ,
    stderr: IO[bytes],
    stdout: IO[bytes] | None = None,
) -> ForkedCommand:
    """Start `pagemill` with these arguments."""
    global _running
    if _running is None:
        _running = _Forks(serve())
    outputs = [stderr] if stdout is None else [stderr, stdout]
    return _running.start(list(arguments), cwd, env, outputs)


def run(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] = os.environ, limit_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run `pagemill` with these arguments to its end, and return what it has printed."""
    with tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as stdout:
        command = start(arguments, cwd=cwd, env=env, stderr=stderr, stdout=stdout)
        try:
            code = command.wait(limit_s)
        finally:
            command.kill()
        printed = []
        for file in (stdout, stderr):
            file.seek(0)
            printed.append(file.read().decode())
        return subprocess.CompletedProcess(arguments, code, *printed)
