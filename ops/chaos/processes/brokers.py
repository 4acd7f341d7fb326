"""The nats-servers of a run: one, or a cluster of three, on disks that faults may fill."""

import asyncio
import subprocess
from pathlib import Path
from typing import Protocol

from ops.chaos.processes.cluster import SIZE, Cluster
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.local_keys import forget_keys, note_keys
from workers.keyring import Keyring


class Brokers(Protocol):
    """The server, or the members of the cluster, of a run."""

    url: str
    held: bool
    """Servers that have ended stay down."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def pick_victim(self) -> int | None:
        """Return the process id of the server for a fault, or None if it does not run."""

    def revive(self) -> list[int]:
        """Start servers again that have ended; return their new process ids."""

    def settle(self) -> None:
        """Return when clients can write."""


class OneBroker:
    """A single nats-server."""

    def __init__(self, store_dir: Path, keyring: Keyring | None = None, disk_mib: int = 0) -> None:
        """With a keyring, every client needs one of its keys.

        With `disk_mib` the store is on a file system of that size.
        """
        accounts = None if keyring is None else keyring.accounts_file
        self._broker = EmbeddedServer(store_dir, accounts_file=accounts)
        self._keyring = keyring
        self._disk_mib = disk_mib
        self.disk = store_dir
        self.url = self._broker.url
        self.held = False

    def start(self) -> None:
        if self._disk_mib:
            mount_disk(self.disk, self._disk_mib)
        self._broker.start()
        if self._keyring is not None:
            # The harness itself connects as the operator, like commands of the same user.
            note_keys(self._broker.port, self._keyring.folder)

    def stop(self) -> None:
        self._broker.stop()
        forget_keys(self._broker.port)
        if self._disk_mib:
            unmount(self.disk)

    def pid(self) -> int:
        return int(self._broker.pid_file.read_text())

    def pick_victim(self) -> int | None:
        return None if self._broker.has_exited else self.pid()

    def revive(self) -> list[int]:
        if self.held or not self._broker.has_exited:
            return []
        self._broker.start()
        return [self.pid()]

    def settle(self) -> None:
        """Return at once, because a single server needs no election."""


class ThreeBrokers:
    """A cluster of three; faults pick their victims from the cluster itself."""

    def __init__(self, folder: Path, disk_mib: int = 0) -> None:
        """With `disk_mib` each member has a file system of that size."""
        self.cluster = Cluster(folder)
        self._disk_mib = disk_mib
        self.url = self.cluster.url
        self.held = False

    def start(self) -> None:
        for member in self.cluster.members if self._disk_mib else ():
            mount_disk(member.store_dir, self._disk_mib)
        asyncio.run(self.cluster.start())

    def stop(self) -> None:
        asyncio.run(self.cluster.stop())
        for member in self.cluster.members if self._disk_mib else ():
            unmount(member.store_dir)

    def pick_victim(self) -> int | None:
        return None

    def revive(self) -> list[int]:
        members = self.cluster.members
        ended = [] if self.held else [n for n in range(SIZE) if members[n].has_exited]
        for number in ended:
            self.cluster.start_member(number)
        return [self.cluster.pid(number) for number in ended]

    def settle(self) -> None:
        asyncio.run(self.cluster.wait_current())


def mount_disk(folder: Path, mib: int) -> None:
    """Mount a file system of `mib` at `folder`, which can be filled without harm."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(folder)]
    subprocess.run(mount, check=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)
