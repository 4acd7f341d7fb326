"""The renderer's side of the spawner: starts it, restarts it if it has ended, and sends it jobs."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

from shared.errors import WorkerFailure
from workers.renderer.decoding.messages import Job, encode

SPAWNER = "workers.renderer.decoding.spawner"
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))"
)
# The only variables that a process gets that reads untrusted bytes.
_ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH")
# The spawner must have one thread when it forks.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Spawning:
    """Starts decoders by the spawner. Thread-safe."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the spawner; None if it was never started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the spawner if there is none. It is ready when the first job is done.

        Raises OSError.
        """
        with self._lock:
            self._start()

    def give(self, job: Job, source: int, target: int) -> socket.socket:
        """Start a decoder, and return the socket on which it answers.

        Raises WorkerFailure when the spawner cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message, descriptors = encode(job), [theirs.fileno(), source, target]
            try:
                with self._lock:
                    try:
                        socket.send_fds(self._start(), [message], descriptors)
                    except (BrokenPipeError, ConnectionResetError):
                        self._end()
                        socket.send_fds(self._start(), [message], descriptors)
            except OSError as error:
                ours.close()
                raise WorkerFailure("a process to decode media could not be started") from error
        return ours

    def close(self) -> None:
        """End the spawner, and with it all decoders; no other is started."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _start(self) -> socket.socket:
        if self._is_closed:
            raise BrokenPipeError("the pool of decoders is closed")
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-c",
                    _BOOT,
                    json.dumps(sys.path),
                    self._module,
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment | _ONE_THREAD,
                # Ctrl-C in a terminal must reach only the renderer, which drains before it ends.
                # The session stays the same: in a new session, the niceness of decoders would only
                # count relative to each other.
                process_group=0,
            )
            undo.pop_all()
        self._control = ours
        return ours

    def _end(self) -> None:
        if self._control is None or self._process is None:
            return
        self._control.close()
        self._control = None
        self._process.kill()
        self._process.wait()
