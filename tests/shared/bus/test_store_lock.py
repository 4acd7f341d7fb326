"""The lock of a broker's store: one broker for each folder, whichever process has started it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.bus.embedded_server import EmbeddedServer
from shared.bus.store_lock import LOCK_FILE
from shared.errors import ConfigError, StoreInUse
from tests.support.waiting import wait_until

# Its server does not end together with it, as on systems other than Linux.
ORPHAN = """
import os, signal, sys
from pathlib import Path
from shared.bus import embedded_server
from shared.helpers import forking
embedded_server.become_child = forking.leave_process_group
server = embedded_server.EmbeddedServer(Path(sys.argv[1]))
server.start()
print(server.pid_file.read_text(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "nats"


@pytest.fixture
def orphan(store: Path) -> Iterator[int]:
    """The process of a server after its parent was killed."""
    command = [sys.executable, "-c", ORPHAN, str(store)]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    yield pid
    end(pid)


def end(pid: int) -> None:
    """Kill a process that is not a child, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        select.select([fd], [], [])
        os.close(fd)


def pid_of(server: EmbeddedServer) -> int:
    return int(server.pid_file.read_text())


def assert_refused(store: Path, pid: int) -> None:
    with pytest.raises(StoreInUse, match=rf"in use by process {pid}:") as refused:
        EmbeddedServer(store).start()
    assert refused.value.field == "nats.store_dir"


def test_two_names_of_one_store_are_one_lock(store: Path, tmp_path: Path) -> None:
    server = EmbeddedServer(store)
    server.start()
    other = tmp_path / "other"
    other.symlink_to(store)
    try:
        assert_refused(store, os.getpid())
        assert_refused(other, os.getpid())
    finally:
        server.stop()
    second = EmbeddedServer(other)
    second.start()
    second.stop()


def test_a_server_that_has_lost_its_parent_keeps_its_store(store: Path, orphan: int) -> None:
    assert_refused(store, orphan)
    end(orphan)
    server = EmbeddedServer(store)
    server.start()
    server.stop()


def test_no_other_takes_the_store_while_a_server_is_restarted(store: Path) -> None:
    server = EmbeddedServer(store)
    server.start()
    try:
        os.kill(pid_of(server), signal.SIGKILL)
        wait_until(lambda: server.has_exited)
        assert_refused(store, os.getpid())
        server.start()
        assert_refused(store, os.getpid())
    finally:
        server.stop()


def test_the_file_of_a_lock_that_is_not_held_does_not_matter(store: Path) -> None:
    store.mkdir()
    (store / LOCK_FILE).write_text(str(os.getpid()))
    server = EmbeddedServer(store)
    server.start()
    server.stop()


def test_a_store_that_cannot_be_locked_is_refused(store: Path) -> None:
    (store / LOCK_FILE).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"lock cannot be locked: Is a directory"):
        EmbeddedServer(store).start()
