"""The nats-servers of a deployment, which cells may keep down, and whose disks they may fill."""

import asyncio
import subprocess
from pathlib import Path

from ops.chaos.processes import network
from ops.chaos.processes.cluster import SIZE, Cluster
from ops.chaos.processes.pool import OneBroker

MEMBER_DISK_MIB = 256


class SingleServer(OneBroker):
    """One nats-server, which the pool restarts unless `held` keeps it down."""

    def __init__(self, folder: Path, disk_mib: int = 0) -> None:
        """With `disk_mib` the store is on a file system of that size."""
        self.disk = folder / "nats"
        self._disk_mib = disk_mib
        super().__init__(self.disk)
        self.held = False

    def start(self) -> None:
        if self._disk_mib:
            mount_disk(self.disk, self._disk_mib)
        super().start()

    def stop(self) -> None:
        super().stop()
        if self._disk_mib:
            unmount(self.disk)

    def revive(self) -> list[int]:
        return [] if self.held else super().revive()

    def pid(self) -> int:
        return int(self._broker.pid_file.read_text())

    def settle(self) -> None:
        """Return at once, because a single server needs no election."""


class ThreeServers:
    """A cluster of three nats-servers, each on a small disk, as the pool's brokers."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder)
        self.url = self.cluster.url
        self.held = False

    def start(self) -> None:
        for member in self.cluster.members:
            mount_disk(member.store_dir, MEMBER_DISK_MIB)
        for number in range(SIZE):
            self.cluster.start_member(number)
        asyncio.run(self.cluster.wait_current())

    def stop(self) -> None:
        for number in range(SIZE):
            self.cluster.resume(number)
        for number, member in enumerate(self.cluster.members):
            member.stop()
            unmount(member.store_dir)
            network.remove_group(self.cluster.group(number))

    def pick_victim(self, pick: int) -> int | None:
        member = self.cluster.members[pick % SIZE]
        return None if member.has_exited else self.cluster.pid(pick % SIZE)

    def revive(self) -> list[int]:
        ended = [n for n, member in enumerate(self.cluster.members) if member.has_exited]
        if self.held:
            return []
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
