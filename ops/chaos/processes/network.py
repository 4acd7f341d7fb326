"""Packet loss and partitions below TCP, in a network namespace with its own loopback device.

`isolate` moves this process, and every process that it starts later, into a network namespace with
a separate 127.0.0.1. There the kernel's packet filter drops packets by port, by chance, or by the
cgroup of the process that sends or receives them. Delay and reordering of packets would need `tc
netem`, which not every kernel has; the proxy delays bytes instead.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
# Mount points of the version 2 hierarchy: together with version 1, and alone.
_HIERARCHIES = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_TRY = "-p tcp --dport 9 -m statistic --mode random --probability 0.5 -j DROP"


@functools.cache
def why_unavailable() -> str | None:
    """Return why packets cannot be dropped here, or None if a child process can drop them."""
    if os.geteuid() != 0:
        return "needs root for a network namespace"
    for tool in ("ip", "iptables", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    script = f"ip link set lo up && iptables -A INPUT {_TRY}"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"the kernel refuses: {tried.stderr.strip()}"


def isolate() -> None:
    """Move to a network namespace; call this before any thread, socket or child exists."""
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
def started_in(group: str) -> Iterator[None]:
    """Start processes in the cgroup `group`; their sockets belong to it.

    A socket belongs to the group of its process at the time of its creation, so a process cannot be
    moved later. Without cgroups this has no effect.
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
    """Remove a group without processes."""
    root = _hierarchy()
    if root is not None:
        with contextlib.suppress(OSError):
            (root / group).rmdir()


# -- rules ------------------------------------------------------------------------------------


@contextlib.contextmanager
def dropping(
    ports: Sequence[int], *, probability: float = 1.0, group: str | None = None
) -> Iterator[None]:
    """Drop packets to and from the servers that listen on `ports`; remove all rules at the end.

    With a `group`, drop only packets that its processes send or receive.
    """
    chance = f"-m statistic --mode random --probability {probability}" if probability < 1 else ""
    for option in ("--dports", "--sports"):
        rule = f"-p tcp -m multiport {option} {','.join(map(str, ports))} {chance} -j DROP"
        if group is None:
            _iptables(f"-A INPUT {rule}")
        else:
            # Incoming packets have a group only after the connection is established; outgoing ones
            # always have one.
            _iptables(f"-A INPUT -m cgroup --path {group} {rule}")
            _iptables(f"-A OUTPUT -m cgroup --path {group} {rule}")
    try:
        yield
    finally:
        for chain in ("INPUT", "OUTPUT"):
            _iptables(f"-F {chain}")


def num_dropped() -> int:
    """Return the number of packets that the present rules have dropped."""
    listed = subprocess.run(
        ["iptables", "-L", "-v", "-x", "-n"], check=True, capture_output=True, text=True
    )
    return sum(int(line.split()[0]) for line in listed.stdout.splitlines() if " DROP " in line)


def _iptables(arguments: str) -> None:
    subprocess.run(["iptables", "-w", *arguments.split()], check=True, capture_output=True)
