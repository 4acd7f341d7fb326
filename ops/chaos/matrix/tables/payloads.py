"""Cells of the fault matrix about large payloads."""

from ops.chaos import alterations
from ops.chaos.matrix.cell import Cell
from ops.chaos.matrix.cells import payloads

SHARED_MEMORY = [
    Cell(
        "shared memory: writer killed",
        "kill -9 of renderers while engines read for 0.5 s, three times",
        "5 s",
        payloads.killed_while_read("renderer"),
        load_s=12,
    ),
    Cell(
        "shared memory: reader killed",
        "kill -9 of engines while they read for 0.5 s, three times",
        "5 s",
        payloads.killed_while_read("engine"),
        load_s=12,
    ),
    Cell(
        "shared memory: writer truncates",
        "truncate of /proc/PID/fd/N, as root",
        "refused",
        payloads.owner_truncates,
    ),
    Cell(
        "shared memory: /dev/shm full",
        "renderers in a mount namespace with a full tmpfs there",
        "5 s",
        payloads.no_shm,
    ),
    Cell(
        "shared memory: stale generation",
        "the key of a request that has ended",
        "lost",
        payloads.stale_reference,
    ),
    Cell("shared memory: forged handle", "random keys", "lost", payloads.forged_reference),
    Cell(
        "shared memory: owner frozen",
        "kill -STOP of a renderer whose payloads are unread",
        f"{payloads.FROZEN_S:.0f} s",
        payloads.owner_frozen,
        load_s=4,
    ),
    Cell(
        "shared memory: arena full",
        "12 MiB for four requests of 10 MiB, engines stopped for 4 s",
        "no error",
        payloads.arena_full,
    ),
    Cell(
        "shared memory: no local socket",
        "engines cannot connect to it",
        "by TCP",
        payloads.without_transports(alterations.no_local_socket, left="TcpTransport"),
    ),
    Cell(
        "shared memory: no socket at all",
        "nor by TCP",
        "by the broker",
        payloads.without_transports(alterations.no_sockets, left="BusTransport"),
    ),
]
