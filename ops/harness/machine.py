"""This machine: its resources and its load, from /proc, and the commit that it runs. Linux."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path

from shared.helpers.process_usage import TICKS_PER_S, usage_of

PROC = Path("/proc")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold a lock for the benchmark. Raises SystemExit while another one runs."""
    with (Path(tempfile.gettempdir()) / "pagemill-bench-peers.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit("another run is under way on this machine") from None
        yield


def cpu_model() -> str:
    for line in (PROC / "cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def describe() -> str:
    """Return the processor, the load of the last minute, the date and the commit."""
    load, today = os.getloadavg()[0], date.today().isoformat()
    return f"{cpu_model()}, {os.cpu_count()} cores, load {load:.1f}, {today}, commit {commit()}"


def commit() -> str:
    """Return the commit of this tree, with a plus sign if files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    with contextlib.suppress(OSError):
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. It stays in /proc until its exit code is read."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def available_bytes() -> int:
    return _kib(PROC / "meminfo", "MemAvailable")


def busy_s() -> float:
    """Return the processor seconds of all processes, and the seconds that other machines stole."""
    ticks = [int(n) for n in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    idle, iowait = ticks[3], ticks[4]
    return (sum(ticks) - idle - iowait) / TICKS_PER_S


def processor_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the processor seconds of processes and their children so far, by name."""
    return {name: usage_of(pid).cpu_s for name, pid in pids.items()}


def peak_bytes(pid: int) -> int:
    """Return the sum of the peak resident memory of a process and its descendants."""
    total = 0
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            total += _kib(PROC / str(each) / "status", "VmHWM")
    return total


def _tree(pid: int) -> list[int]:
    children = defaultdict(list)
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                children[int(_stat(int(folder.name))[1])].append(int(folder.name))
    tree = [pid]
    for each in tree:
        tree += children[each]
    return tree


def _stat(pid: int) -> list[str]:
    """Return the fields from the third on, after the name, which may contain any character."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _kib(file: Path, key: str) -> int:
    """Return bytes; 0 if the field is absent, as for a process that has ended."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    return 0
