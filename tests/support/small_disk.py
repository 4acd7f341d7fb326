"""A small file system for a broker's store, and a file that fills it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.chaos.processes.brokers import mount_disk, unmount


@contextlib.contextmanager
def mounted_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of `mib` at a folder. Skip the test without the right to do so."""
    try:
        mount_disk(folder, mib)
    except subprocess.CalledProcessError:
        pytest.skip("needs the right to mount a file system")
    yield folder
    unmount(folder)


def fill_until(disk: Path, free_bytes: int = 0) -> Path:
    """Write a file until at most `free_bytes` of a disk are free, and return it."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while _free_bytes(disk) > free_bytes or not free_bytes:
            file.write(bytes(4096))
    return ballast


def _free_bytes(disk: Path) -> int:
    usage = os.statvfs(disk)
    return usage.f_bavail * usage.f_frsize
