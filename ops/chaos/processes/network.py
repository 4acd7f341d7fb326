"""Packet loss and partitions below TCP, on a loopback device that nobody else has.

`isolate` puts this process, and every process that it starts from then on, into a network namespace
of its own: its 127.0.0.1 is not the machine's. There the kernel's packet filter drops packets by
port, by chance (`iptables -m statistic`), or by the process that sends or receives them (its
cgroup). Delay and reordering of packets would need `tc netem`, which this kernel does not have; for
delay there is the proxy.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

CLONE_NEWNET = 0x40000000
# The version 2 hierarchy, where version 1 is mounted beside it, and where it is the only one.
_HIERARCHIES = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_TRY = "-p tcp --dport 9 -m statistic --mode random --probability 0.5 -j DROP"

Way = Literal["to", "from"]
BOTH: tuple[Way, ...] = ("to", "from")


@functools.cache
def why_not() -> str | None:
    """Why packets cannot be dropped here; None where they can. Tried in a child."""
    if os.geteuid() != 0:
        return "needs root for a network namespace"
    for tool in ("ip", "iptables", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    script = f"ip link set lo up && iptables -A INPUT {_TRY}"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"the kernel refuses: {tried.stderr.strip()}"


def isolate() -> None:
    """Leave the machine's network for one of our own. Before any thread, socket or child."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


# -- groups of processes --------------------------------------------------------------------------


@functools.cache
def _hierarchy() -> Path | None:
    for path in _HIERARCHIES:
        if (path / "cgroup.procs").exists() and (path / "cgroup.controllers").exists():
            return path
    return None


@contextlib.contextmanager
def born_in(group: str) -> Iterator[None]:
    """Processes that are started inside belong to `group`, with every socket that they open.

    A socket belongs to the group in which its process was when it was made; therefore a process
    cannot be moved afterwards. Where groups are not to be had this does nothing.
    """
    root = _hierarchy()
    if root is None or os.geteuid() != 0:
        yield
        return
    home = next(
        line.rpartition(":")[2].strip().lstrip("/")
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.startswith("0::")
    )
    folder = root / group
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (root / home / "cgroup.procs").write_text(str(os.getpid()))


def remove_group(group: str) -> None:
    """Once its processes have ended."""
    root = _hierarchy()
    if root is not None:
        with contextlib.suppress(OSError):
            (root / group).rmdir()


# -- rules ------------------------------------------------------------------------------------


def drop(
    ports: Sequence[int],
    ways: Sequence[Way] = BOTH,
    *,
    probability: float = 1.0,
    group: str | None = None,
) -> None:
    """From now on lose packets to, from, or to and from the servers that listen on `ports`.

    With a `group`, only those that its processes send or receive.
    """
    chance = f"-m statistic --mode random --probability {probability}" if probability < 1 else ""
    for way in ways:
        option = "--dports" if way == "to" else "--sports"
        what = f"-p tcp -m multiport {option} {','.join(map(str, ports))} {chance} -j DROP"
        if group is None:
            _iptables(f"-A INPUT {what}")
        else:
            # What arrives has a group only once its connection stands; what leaves always has one.
            _iptables(f"-A INPUT -m cgroup --path {group} {what}")
            _iptables(f"-A OUTPUT -m cgroup --path {group} {what}")


def heal() -> None:
    for chain in ("INPUT", "OUTPUT"):
        _iptables(f"-F {chain}")


def num_dropped() -> int:
    """Packets that the rules of the moment have dropped so far."""
    listed = subprocess.run(
        ["iptables", "-L", "-v", "-x", "-n"], check=True, capture_output=True, text=True
    )
    return sum(int(line.split()[0]) for line in listed.stdout.splitlines() if " DROP " in line)


def _iptables(arguments: str) -> None:
    subprocess.run(["iptables", "-w", *arguments.split()], check=True, capture_output=True)
