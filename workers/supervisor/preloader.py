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
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from shared.bus.embedded_server import end_with_parent, leave_process_group

MAX_MESSAGE_BYTES = 1 << 17

# stderr, and stdout if there is a second descriptor.
_OUTPUTS = (2, 1)
# Signals that a supervisor forwards to workers itself.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Start(msgspec.Struct, tag=True, frozen=True):
    """Request to fork a process, sent together with descriptors for its stderr and stdout."""

    arguments: list[str]
    env: dict[str, str] | None = None
    """The whole environment; by default the preloader's environment."""
    folder: str | None = None
    """Working directory; by default the preloader's directory."""


class Started(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Start`. Answers have the order of the requests."""

    pid: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Start` when Linux refuses another process."""

    errno: int


class Exited(msgspec.Struct, tag=True, frozen=True):
    """The end of a forked process."""

    pid: int
    code: int
    """Exit code, or minus the number of the signal that ended the process."""


Event = Started | Failed | Exited

encode = msgspec.json.Encoder().encode
decode_event = msgspec.json.Decoder(Event).decode
_decode_start = msgspec.json.Decoder(Start).decode


def serve(channel: socket.socket, modules: Sequence[str], main: Callable[[], Any]) -> None:
    """Import `modules`, then fork a process for each `Start` until the channel is closed.

    `channel` is a SOCK_SEQPACKET socket. A forked process has the arguments in `sys.argv[1:]`; it
    runs `main` and ends with SystemExit, which passes through the caller of this function.
    """
    leave_process_group()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    # Collections in a worker would otherwise write to, and so copy, the memory of the modules.
    gc.collect()
    gc.freeze()
    children: dict[int, int] = {}
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in children:
                poller.unregister(descriptor)
                os.close(descriptor)
                pid, status = os.waitpid(children.pop(descriptor), 0)
                _send(channel, Exited(pid, os.waitstatus_to_exitcode(status)))
                continue
            try:
                message, descriptors, _, _ = socket.recv_fds(
                    channel, MAX_MESSAGE_BYTES, len(_OUTPUTS)
                )
            except ConnectionResetError:
                return  # The supervisor has ended without having read all events.
            if not message:
                return
            try:
                pid, watched = _fork(
                    _decode_start(message), descriptors, [channel.fileno(), *children], main
                )
            except OSError as error:
                _send(channel, Failed(error.errno or 0))
                continue
            children[watched] = pid
            poller.register(watched, select.POLLIN)
            _send(channel, Started(pid))


def _fork(
    start: Start, descriptors: list[int], foreign: list[int], main: Callable[[], Any]
) -> tuple[int, int]:
    """Fork a process with separate outputs, and without the preloader's descriptors `foreign`.

    Returns its id and a descriptor that becomes readable at its end. Raises OSError. In the forked
    process it never returns, and raises nothing but SystemExit.
    """
    ours = os.getpid()
    # A signal that arrives before the new process has installed its handlers stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    pid = None
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
            for descriptor in descriptors:
                os.close(descriptor)
    if pid == 0:
        _run_child(start, descriptors, foreign, main, ours)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _run_child(
    start: Start, descriptors: list[int], foreign: list[int], main: Callable[[], Any], parent: int
) -> NoReturn:
    """Run `main` in the forked process, and raise SystemExit."""
    try:
        end_with_parent()
        if os.getppid() != parent:
            raise SystemExit(1)  # The preloader died before the call.
        for descriptor in foreign:
            os.close(descriptor)
        _become_worker(start, descriptors)
        main()
    except SystemExit:
        raise
    except BaseException:
        # The callers on the stack belong to the preloader, and would handle some exceptions.
        try:
            traceback.print_exc()
            sys.stdout.flush()
        finally:
            os._exit(1)
    raise SystemExit(0)


def _send(channel: socket.socket, event: Event) -> None:
    # Without a supervisor, the next read of the channel returns nothing and ends the process.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(encode(event))


def _become_worker(start: Start, descriptors: list[int]) -> None:
    """Set up the arguments, environment, folder and outputs that `exec` would have set."""
    leave_process_group()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
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
        self._requested: deque[asyncio.Future[ForkedProcess]] = deque()
        self._processes: dict[int, ForkedProcess] = {}
        self._reads = False
        self.has_ended = False

    @property
    def returncode(self) -> int | None:
        """A code other than None once the process has ended."""
        return 1 if self.has_ended else None

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
        loop = asyncio.get_running_loop()
        if self.has_ended:
            raise ConnectionResetError("the preloader has ended")
        if not self._reads:
            loop.add_reader(self._channel, self._read)
            self._reads = True
        start = Start(list(arguments), env, folder)
        socket.send_fds(self._channel, [encode(start)], [stderr])
        requested: asyncio.Future[ForkedProcess] = loop.create_future()
        self._requested.append(requested)
        # If the caller is cancelled, the process must still get an owner.
        return await asyncio.shield(requested)

    def close(self) -> None:
        """End the preloader. Its processes receive SIGTERM, so they should have ended before."""
        if self._reads:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._reads = False
        self._channel.close()
        self.has_ended = True
        # During an import, which takes seconds, the preloader does not notice the closed channel.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _read(self) -> None:
        try:
            message = self._channel.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            message = b""
        if not message:
            self._lose_all()
            return
        match decode_event(message):
            case Started(pid):
                process = self._processes[pid] = ForkedProcess(pid)
                self._requested.popleft().set_result(process)
            case Failed(number):
                self._requested.popleft().set_exception(OSError(number, os.strerror(number)))
            case Exited(pid, code):
                self._processes.pop(pid).end(code)

    def _lose_all(self) -> None:
        """The preloader has ended, and each of its processes has received SIGTERM."""
        asyncio.get_running_loop().remove_reader(self._channel)
        self._reads = False
        self.has_ended = True
        for requested in self._requested:
            requested.set_exception(ConnectionResetError("the preloader has ended"))
        self._requested.clear()
        for process in self._processes.values():
            process.end(-signal.SIGTERM)
        self._processes.clear()


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
