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
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from shared.helpers.forking import MAX_REPORT_BYTES, fork, read_end, read_pid
from workers.supervisor import preloader
from workers.supervisor.preloader import Start

ROOT = Path(__file__).parent.parent
# Environment variable with the path of the preloader's socket.
ADDRESS = "TESTS_PRELOADER"
# Environment variable that names a module whose `register_roles` a command calls first.
ROLES_OF = "TESTS_ROLES_OF"
# Environment variable that names an interpreter for the workers that `pagemill up` does not fork.
PYTHON_OF = "TESTS_PYTHON_OF_WORKERS"
# Environment variable with which ranks of engines are no forks. A fork is no child of its engine,
# and a signal to the process that stands for it does not reach it.
WITHOUT_FORKED_RANKS = "TESTS_WITHOUT_FORKED_RANKS"
# An interpreter with the options -m and -c. In runs of pytest-xdist, it forks its programs.
PYTHON = [sys.executable, "-IS", str(ROOT / "tests" / "forked_python.py")]
# The same, and its programs have the modules of the tests in memory too.
COLLECTED_PYTHON = [*PYTHON, "--collected"]


def write_python(file: Path) -> None:
    """Write a command that is used like PYTHON where one path is expected."""
    file.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    file.chmod(0o755)


class ForkedCommand:
    """A running command; it is used like `subprocess.Popen`."""

    def __init__(self, report: socket.socket) -> None:
        self._report = report
        self.pid = read_pid(report.recv(MAX_REPORT_BYTES))
        self.returncode: int | None = None
        self._lock = threading.Lock()
        # Tests kill a command without waiting for its end. Its report is not read then. A method
        # `__del__` could run after the collector has found the socket open in the same cycle.
        weakref.finalize(self, report.close)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(BlockingIOError):
                    message = self._report.recv(MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
                    self.returncode = read_end(message).code
                    self._report.close()
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
    """A connection to the preloader."""

    def __init__(self, address: str) -> None:
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.connect(address)
        self._channel.send(b"-")

    def start(
        self, arguments: list[str], cwd: Path, env: Mapping[str, str], outputs: list[IO[bytes]]
    ) -> ForkedCommand:
        message = preloader.encode(Start(arguments, dict(env), str(cwd)))
        return ForkedCommand(fork(self._channel, message, [file.fileno() for file in outputs]))


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
