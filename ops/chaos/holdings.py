"""What a process holds, by what the kernel and asyncio say of it."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

from ops.chaos.history import Snapshot, now
from shared.bus import Bus

ARENA = b"\0pagemill-"


def take_snapshot(role: str, bus: Bus) -> Snapshot:
    links = {name: _link(name) for name in os.listdir("/proc/self/fd")}
    roads = [road for name, link in links.items() if link[:7] == "socket:" for road in _road(name)]
    peers = [peer for peer in roads if peer is not None]
    readers = len(roads) - len(peers)
    with open("/proc/self/status") as file:
        threads = next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
    with open("/proc/self/maps") as file:
        mappings = sum("/memfd:pagemill" in line for line in file)
    # A mapping has a descriptor of its own; one of them is of the worker's own arena.
    foreign = max(mappings - 1, 0)
    return Snapshot(
        t=now(),
        role=role,
        pid=os.getpid(),
        # The listing itself has one open.
        fds=len(links) - 1 - len(roads) - foreign,
        memfds=sum(link.startswith("/memfd:") for link in links.values()) - foreign,
        threads=threads,
        # Each reader is served by one.
        tasks=len(asyncio.all_tasks()) - readers,
        subscriptions=len(bus._nc._subs),
        mappings=mappings,
        peers=sorted(peers),
        readers=readers,
    )


def _road(name: str) -> Iterator[str | None]:
    """Whose arena the connection leads to, None if that is our own; nothing if it is no road."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
        if sock.family != socket.AF_UNIX or sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return
        if _is_arena(sock.getsockname()):
            yield None
        elif _is_arena(peer := sock.getpeername()):
            yield peer[1:].decode()


def _is_arena(address: object) -> bool:
    return isinstance(address, bytes) and address.startswith(ARENA)


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""
