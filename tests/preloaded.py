"""Commands of Pagemill as forks of one process with all modules in memory.

Tests start a hundred workers and clusters. The imports of each would take one to five seconds of
processor time, the longest part of a run. `python -m tests.preloaded` is the preloader of `pagemill
up`, with the whole command line as what it forks; each test process starts one.
"""

import atexit
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, NoReturn

import msgspec
from huggingface_hub import constants
from huggingface_hub.utils import _cache_manager
from rich.console import Console

from workers import __main__ as pagemill
from workers import roles
from workers.cli import preloader, terminal
from workers.cli.models import download
from workers.cli.models.reports import Report
from workers.cli.preloader import MAX_MESSAGE_BYTES, Event, Exited, Start, Started
from workers.engine.model import check_folders

ROOT = Path(__file__).parent.parent
# Environment variable that names a module whose `register_roles` a command calls first.
ROLES_OF = "TESTS_ROLES_OF"
MODULES = [spec.module for spec in roles.all_roles()]
COMMANDS = sorted({command.partition(":")[0] for command in pagemill.COMMANDS})


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
    """The preloader of this test process, and the exit codes that it has reported."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
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

    def close(self) -> None:
        self._channel.close()
        self._process.wait(30)


_running: _Forks | None = None


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
        _running = _Forks()
        atexit.register(_running.close)
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


def _check_folders(folders: Sequence[Path], _: Sequence[str | None] = ()) -> list[Report]:
    said = [check_folders._report(folder) for folder in folders]
    return msgspec.convert(said, list[Report], from_attributes=True)


def _main() -> None:
    if (own := os.environ.get(ROLES_OF)) is not None:
        importlib.import_module(own).register_roles()
    # A console reads its width from the environment when it is made.
    for console in (terminal.out, terminal.errors):
        vars(console).update(vars(Console(stderr=console.stderr)))
    # So does the hub's library read its address and its folders, when it is imported.
    for module in (constants, _cache_manager):
        importlib.reload(module)
    # `pagemill pull` would start a process that imports transformers, which is in memory here.
    vars(download).update(check_folders=_check_folders)
    try:
        pagemill.main()
    except SystemExit as end:
        _exit(end)


def _exit(end: SystemExit) -> NoReturn:
    """Do what Python does at its end, but leave the modules as they are.

    Their teardown writes to most of the memory that a fork shares, in 0.3 s of processor time.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)  # noqa: T201
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # Python's own for outputs that fail.
    os._exit(code)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # `up` has workers that use torch forked, and executes the others, which start without torch.
    # Here every worker is a fork. tests/cli/test_commands.py starts the others without torch.
    for spec in roles.all_roles():
        roles._ROLES[spec.name] = replace(spec, uses_torch=True)
    preloader.serve(socket.socket(fileno=int(sys.argv[1])), [*MODULES, *COMMANDS], _main)
