"""Processor time and disk reads of a process and its children, from /proc."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Indices of utime, stime, cutime and cstime after the process name; see proc_pid_stat(5). The last
# two are the time of children that have ended, such as the compiler of the kernels.
TIMES = slice(11, 15)


class Usage(NamedTuple):
    cpu_s: float = 0.0
    read_bytes: int = 0
    """Bytes that were fetched from a disk, also by reading mapped files."""


UNUSED = Usage()


def usage_of(pid: int) -> Usage:
    """Return the usage of a process and its living descendants. Unreadable values count as 0."""
    folder = PROC / str(pid)
    ticks, num_bytes = 0, 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name of the process is in parentheses and may hold any character.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        ticks = sum(map(int, fields[TIMES]))
    with contextlib.suppress(OSError, ValueError, IndexError):
        counters = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
        num_bytes = int(counters.get("read_bytes", 0))
    below = [usage_of(child) for child in _children(folder)]
    return Usage(
        ticks / TICKS_PER_S + sum(usage.cpu_s for usage in below),
        num_bytes + sum(usage.read_bytes for usage in below),
    )


def _children(folder: Path) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for file in folder.glob("task/*/children"):
            with contextlib.suppress(OSError):
                children += map(int, file.read_text().split())
    return children
