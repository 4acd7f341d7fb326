"""Fork server: a process that forks a child for each message on its socket. Standard library alone.

A message comes with descriptors. The first is the server's end of a report: a socket on which the
server sends the id of the child and, later, how the child has ended. The child gets the message and
the other descriptors. A client ends the server, and with it all children, by closing the socket.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple, NoReturn

MAX_MESSAGE_BYTES = 2**17
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a server ignores, and that end a child."""

_PR_SET_PDEATHSIG = 1
# The id of a child, or an error number with a minus; later an exit code, and CPU seconds.
_REPORT = Struct("=id")
MAX_REPORT_BYTES = _REPORT.size

# Servers that are executed import nothing but their module, and get nothing else of the
# environment. They must have one thread when they fork.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))"
)
_ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """The end of a child."""

    code: int
    """Exit code, or minus the number of the signal that ended the process."""
    cpu_s: float


class _Child(NamedTuple):
    pid: int
    pidfd: int
    report: socket.socket


class ForkServer:
    """The process that forks; the caller must have one thread."""

    def __init__(
        self,
        channel: socket.socket,
        num_descriptors: int,
        child: Callable[[bytes, list[int]], None],
        *,
        drains: bool = False,
    ) -> None:
        """`child` gets a message and at most `num_descriptors` descriptors in a new process.

        The process ends when `child` returns, or by its SystemExit, which passes through the caller
        of `serve`. A child is killed when the server ends, or when its client closes the report.
        With `drains`, it receives SIGTERM when the server ends, and its report does not matter.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._channel = channel
        self._num_descriptors = num_descriptors
        self._child = child
        self._drains = drains
        self._children: dict[int, _Child] = {}
        """Running children by the descriptor that is readable at their end."""
        self._abandoned: dict[int, _Child] = {}
        """The same children by their report socket. Only the client's end of it is watched."""
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)

    def serve(self) -> None:
        """Fork children until the channel is closed."""
        # A collection in a child would otherwise write to, and so copy, the memory that it shares.
        gc.collect()
        gc.freeze()
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor in self._children:
                    self._reap(self._children.pop(descriptor))
                elif descriptor in self._abandoned:
                    child = self._abandoned.pop(descriptor)
                    self._poller.unregister(descriptor)
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
                elif descriptor == self._channel.fileno() and not self._start():
                    return

    def _start(self) -> bool:
        """Fork a child for the next message; return whether there may be further messages."""
        message, descriptors, _, _ = socket.recv_fds(
            self._channel, MAX_MESSAGE_BYTES, 1 + self._num_descriptors
        )
        if not descriptors:
            return bool(message)  # Descriptors are lost when this process has no room for them.
        report = socket.socket(fileno=descriptors[0])
        try:
            child = self._fork(message, descriptors[1:], report)
        except OSError as error:
            _send(report, -(error.errno or 1))
            report.close()
            return True
        self._children[child.pidfd] = child
        self._poller.register(child.pidfd, select.POLLIN)
        if not self._drains:
            self._abandoned[report.fileno()] = child
            self._poller.register(report, 0)
        _send(report, child.pid)
        return True

    def _fork(self, message: bytes, descriptors: list[int], report: socket.socket) -> _Child:
        """Fork a child. Raises OSError; in the child it raises nothing but SystemExit."""
        parent, pid = os.getpid(), None
        # A signal that arrives before the child has installed its handlers stays pending.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                for descriptor in descriptors:
                    os.close(descriptor)
        if pid == 0:
            self._run_child(message, descriptors, report, parent)
        try:
            return _Child(pid, os.pidfd_open(pid), report)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _run_child(
        self, message: bytes, descriptors: list[int], report: socket.socket, parent: int
    ) -> NoReturn:
        try:
            end_with_parent(signal.SIGTERM if self._drains else signal.SIGKILL)
            if os.getppid() != parent:
                raise SystemExit(1)  # The server died before the call.
            self._channel.close()
            report.close()
            for child in self._children.values():
                child.report.close()
                os.close(child.pidfd)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self._child(message, descriptors)
        except SystemExit:
            raise
        except BaseException:
            # The callers on the stack belong to the server, and would handle some exceptions.
            try:
                traceback.print_exc()
                sys.stdout.flush()
            finally:
                os._exit(1)
        raise SystemExit(0)

    def _reap(self, child: _Child) -> None:
        """Report the end of a child."""
        _, status, usage = os.wait4(child.pid, 0)
        self._poller.unregister(child.pidfd)
        os.close(child.pidfd)
        if self._abandoned.pop(child.report.fileno(), None) is not None:
            self._poller.unregister(child.report)
        cpu_s = usage.ru_utime + usage.ru_stime
        _send(child.report, os.waitstatus_to_exitcode(status), cpu_s)
        child.report.close()


def _send(report: socket.socket, number: int, seconds: float = 0.0) -> None:
    # The client may have closed its end.
    with contextlib.suppress(OSError):
        report.send(_REPORT.pack(number, seconds), socket.MSG_DONTWAIT)


def fork(channel: socket.socket, message: bytes, descriptors: Sequence[int]) -> socket.socket:
    """Have a server fork a child, and return the client's end of its report. Raises OSError.

    The first message of the report is for `read_pid`, the second one for `read_end`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            socket.send_fds(channel, [message], [theirs.fileno(), *descriptors])
        except BaseException:
            ours.close()
            raise
    return ours


def read_pid(message: bytes) -> int:
    """Return the id of a child. Raises OSError, ConnectionResetError if the server has ended."""
    number, _ = _unpack(message)
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    return number


def read_end(message: bytes) -> Ended:
    """Return how a child has ended. Raises ConnectionResetError if the server has ended as well."""
    return Ended(*_unpack(message))


def _unpack(message: bytes) -> tuple[int, float]:
    if not message:
        raise ConnectionResetError("the fork server has ended")
    number, seconds = _REPORT.unpack(message)
    return number, seconds


class Forks:
    """Client of a server that is executed, again if it has ended. Thread-safe."""

    def __init__(self, module: str) -> None:
        """`module.main` gets the descriptor of the server's socket."""
        self._module = module
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it was never started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server if there is none. Raises OSError."""
        with self._lock:
            self._start()

    def fork(self, message: bytes, descriptors: Sequence[int]) -> socket.socket:
        """Fork a child as the function `fork` does. Raises OSError."""
        with self._lock:
            try:
                return fork(self._start(), message, descriptors)
            except (BrokenPipeError, ConnectionResetError):
                self._end()
                return fork(self._start(), message, descriptors)

    def close(self) -> None:
        """End the server, and with it all children; no other is started."""
        with self._lock:
            self._is_closed = True
            self._end()

    def __del__(self) -> None:
        # An engine or a renderer that fails at its start does not close its server.
        self._end()

    def _start(self) -> socket.socket:
        if self._is_closed:
            raise BrokenPipeError("the fork server is closed")
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = self._execute(theirs)
            undo.pop_all()
        self._channel = ours
        return ours

    def _execute(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        arguments = [json.dumps(sys.path), self._module, str(channel.fileno())]
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[channel.fileno()],
            env=environment | _ONE_THREAD,
            # Ctrl-C in a terminal must reach only the worker, which drains before it ends.
            # The session stays the same: in a new session, the niceness of children would only
            # count relative to each other.
            process_group=0,
        )

    def _end(self) -> None:
        if self._channel is None or self._process is None:
            return
        self._channel.close()
        self._channel = None
        self._process.kill()
        self._process.wait()


def become_child() -> None:
    """Move this new process to a separate process group, and make it end with its parent."""
    leave_process_group()
    end_with_parent()


def leave_process_group() -> None:
    """Move this process to a separate process group, so that it gets no signals of a terminal.

    The session stays the same. If Linux schedules processes by session (`sched_autogroup_enabled`,
    outside of containers and services), niceness has an effect only within a session. In a separate
    session, a worker's work of low priority would get as much time as all other workers together.
    """
    os.setpgid(0, 0)
    # Only a process without a controlling terminal reloads its configuration after SIGHUP.
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)
    # A terminal with `tostop` would stop processes of another group when they write.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Make Linux send a signal to this new process when its parent dies.

    Otherwise the children of a killed supervisor would continue and occupy their ports.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
