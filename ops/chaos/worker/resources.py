"""The resources of a worker's process, as the kernel and asyncio report them."""

import asyncio
import contextlib
import os
import socket

from ops.chaos.history import Snapshot, now
from shared.bus.bus import Bus

ARENA_PREFIX = b"\0pagemill-"
SERVES_READER = "_ReaderConnection.serve"
"""Function of the task that serves a reader of the arena of the process."""


def take_snapshot(role: str, bus: Bus) -> Snapshot:
    """Count the resources of this process."""
    links = {name: _read_link(name) for name in os.listdir("/proc/self/fd")}
    broker = bus.connection.nc.connected_url
    peers, readers = _arena_connections(links, None if broker is None else broker.port)
    with open("/proc/self/status") as file:
        threads = next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
    with open("/proc/self/maps") as file:
        mappings = sum("/memfd:pagemill" in line for line in file)
    # Each mapping has a descriptor; one of them belongs to the worker's own arena.
    foreign = max(mappings - 1, 0)
    names = sorted(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    # Not `readers`: an engine of several ranks may have accepted a connection of another rank.
    names = [name for name in names if name != SERVES_READER]
    return Snapshot(
        t=now(),
        role=role,
        pid=os.getpid(),
        # Listing the folder opens one more.
        fds=len(links) - 1 - len(peers) - readers - foreign,
        memfds=sum(link.startswith("/memfd:") for link in links.values()) - foreign,
        threads=threads,
        tasks=len(names),
        subscriptions=len(bus.connection.nc._subs),
        mappings=mappings,
        peers=peers,
        readers=readers,
        task_names=names,
    )


def _arena_connections(links: dict[str, str], broker_port: int | None) -> tuple[list[str], int]:
    """Return the addresses of the arenas that this process reads, and its number of readers."""
    socks = []
    for name, link in links.items():
        if link.startswith("socket:"):
            with contextlib.suppress(OSError):
                socks.append(socket.socket(fileno=os.dup(int(name))))
    ours, peers, readers = set(), [], 0
    for sock in socks:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            ours.add(sock.getsockname())
    for sock in socks:
        with sock, contextlib.suppress(OSError):
            peer = sock.getpeername()
            if sock.getsockname() in ours:
                readers += 1
            elif sock.family == socket.AF_INET and peer[1] != broker_port:
                peers.append(f"{peer[0]}:{peer[1]}")
            elif isinstance(peer, bytes) and peer.startswith(ARENA_PREFIX):
                peers.append(peer[1:].decode())
    return sorted(peers), readers


def _read_link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""
