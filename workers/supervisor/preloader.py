"""Worker processes that are forked from a process with torch in memory.

The modules of an engine take more than four seconds of processor time to import. `pagemill up` has
a process import them once. A worker that has died is then replaced by a fork of this process, which
needs no imports and shares the memory of the modules.
"""

import asyncio
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shared.helpers.forking import (
    MAX_REPORT_BYTES,
    ForkServer,
    fork,
    leave_process_group,
    read_end,
    read_pid,
)
from shared.helpers.task_set import TaskSet

# stderr, and stdout if there is a second descriptor.
_OUTPUTS = (2, 1)


class Start(msgspec.Struct, frozen=True):
    """Request to fork a process, sent together with descriptors for its stderr and stdout."""

    arguments: list[str]
    env: dict[str, str] | None = None
    """The whole environment; by default the preloader's environment."""
    folder: str | None = None
    """Working directory; by default the preloader's directory."""


encode = msgspec.json.Encoder().encode
_decode_start = msgspec.json.Decoder(Start).decode


def serve(channel: socket.socket, modules: Sequence[str], main: Callable[[], Any]) -> None:
    """Import `modules`, then fork a process for each `Start` until the channel is closed.

    `channel` is a SOCK_SEQPACKET socket. A forked process has the arguments in `sys.argv[1:]`; it
    runs `main` and ends with SystemExit, which passes through the caller of this function.
    """

    def run_worker(message: bytes, descriptors: list[int]) -> None:
        _become_worker(_decode_start(message), descriptors)
        main()

    leave_process_group()
    # The server ignores signals, because a supervisor forwards them to workers itself.
    server = ForkServer(channel, len(_OUTPUTS), run_worker, drains=True)
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    server.serve()


def _become_worker(start: Start, descriptors: list[int]) -> None:
    """Set up the arguments, environment, folder and outputs that `exec` would have set."""
    leave_process_group()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, output in zip(descriptors, _OUTPUTS, strict=False):
        os.dup2(descriptor, output)
        os.close(descriptor)
    if start.env is not None:
        os.environ.clear()
        os.environ.update(start.env)
        tempfile.tempdir = None  # It was read from TMPDIR at its first use.
    if start.folder is not None:
        os.chdir(start.folder)
    sys.argv[1:] = start.arguments
    gc.enable()


class ForkedProcess:
    """Process forked by a preloader, with the methods of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exited = asyncio.Event()

    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        self.returncode = code
        self._exited.set()


class Preloader:
    """Handle of the supervisor for a process that runs `serve`."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        channel.setblocking(False)
        self._channel = channel
        self.pid = pid
        self._watching = TaskSet()

    @property
    def returncode(self) -> int | None:
        """A code other than None once the process has ended."""
        return 1 if self.has_ended else None

    @property
    def has_ended(self) -> bool:
        if self._channel.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._channel, 0)
        return bool(poller.poll(0))

    async def start(
        self,
        arguments: Sequence[str],
        *,
        stderr: int,
        env: dict[str, str] | None = None,
        folder: str | None = None,
    ) -> ForkedProcess:
        """Fork a process with the descriptor `stderr` as its stderr.

        Raises ConnectionError when the preloader has ended, and OSError when it cannot fork.
        """
        if self.has_ended:
            raise ConnectionResetError("the preloader has ended")
        report = fork(self._channel, encode(Start(list(arguments), env, folder)), [stderr])
        started: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._watching.start(_watch(report, started))
        # If the caller is cancelled, the process must still get an owner.
        return await asyncio.shield(started)

    def close(self) -> None:
        """End the preloader. Its processes receive SIGTERM, so they should have ended before."""
        self._channel.close()
        # During an import, which takes seconds, the preloader does not notice the closed channel.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


async def _watch(report: socket.socket, started: asyncio.Future[ForkedProcess]) -> None:
    """Follow the report of a forked process to its end."""
    loop = asyncio.get_running_loop()
    with report:
        report.setblocking(False)
        try:
            process = ForkedProcess(read_pid(await loop.sock_recv(report, MAX_REPORT_BYTES)))
        except OSError as error:
            started.set_exception(error)
            started.exception()  # Retrieves it, because the caller may have been cancelled.
            return
        started.set_result(process)
        try:
            process.end(read_end(await loop.sock_recv(report, MAX_REPORT_BYTES)).code)
        except ConnectionError:
            process.end(-signal.SIGTERM)  # The preloader has ended, which sends this signal.


def fork_preloader(modules: Sequence[str], main: Callable[[], Any]) -> Preloader:
    """Fork a process that runs `serve`.

    Only a process without threads and event loop may call this. In the forked process, and in each
    of the processes that are forked from it, this raises SystemExit.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve(theirs, modules, main)
        # The stack of the caller belongs to the supervisor.
        os._exit(0)
    theirs.close()
    return Preloader(ours, pid)
