"""Free space of the broker's stores: observers report full stores, and workers refuse requests.

The supervisor of an embedded broker knows the free space of its disk. A coordinator knows only the
limits of the servers: nats-server 2.15.1 does not report the free space of its disk to any client.
Both publish full stores next to the heartbeats, and the message expires like them. Without an
observer, no request is refused.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
from nats.errors import Error as NatsError

from shared.bus.bus import Bus
from shared.bus.server_settings import read_servers
from shared.bus.store_probes import PROBE_S
from shared.config.schema import NatsConfig
from shared.errors import DiskFull, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.full_stores import FullStore, FullStores, decode_full_stores

Measure = Callable[[], Awaitable[list[FullStore]]]

READ_S = 1.0

_log = structlog.get_logger()


class StoreRoom:
    """The full stores, from the list that an observer published last."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._full: list[FullStore] = []
        self._read_s = float("-inf")

    @property
    def num_full(self) -> int:
        """Number of full stores in the list that was read last."""
        return len(self._full)

    async def check(self) -> None:
        """Raise DiskFull while the broker has too little free space for new requests."""
        if (error := await self.find_error()) is not None:
            raise error

    async def find_error(self) -> DiskFull | None:
        """Return the error of new requests while the broker has too little free space."""
        if time.monotonic() - self._read_s > READ_S:
            # Set before the read, so that other callers do not wait for it.
            self._read_s = time.monotonic()
            with contextlib.suppress(Unavailable):
                self._full = await _read_full_stores(self._bus)
        return _refusal(self._full[0]) if self._full else None

    async def follow(self) -> None:
        """Read the list periodically. Never returns."""
        while True:
            await self.find_error()
            await asyncio.sleep(READ_S)


def _refusal(store: FullStore) -> DiskFull:
    # Clients get this message, so it does not name the folder or the server. The log does.
    return DiskFull.of(
        "the broker's disk",
        store.free_bytes,
        store.min_free_bytes,
        "new requests, files and responses are refused until it has more"
        " (nats.min_free_percent, nats.min_free_mib)",
    )


async def _read_full_stores(bus: Bus) -> list[FullStore]:
    stored = await bus.read_last(subjects.WORKERS_STREAM, subjects.FULL_STORES)
    message = None if stored is None else decode_full_stores(stored.data)
    return [] if message is None else message.stores


async def report_room(bus: Bus, measure: Measure) -> None:
    """Measure periodically, and publish the full stores; once also an empty list. Never returns."""
    before: list[FullStore] = []
    reason = ""
    while True:
        try:
            full = await measure()
            if full or before:
                await bus.publish_without_id(subjects.FULL_STORES, to_json(FullStores(full)))
            _log_change(before, full)
            before, reason = full, ""
        except Unavailable as error:
            if error.message != reason:
                reason = error.message
                _log.warning("store_not_measured", reason=reason)
        await asyncio.sleep(PROBE_S)


def _log_change(before: list[FullStore], full: list[FullStore]) -> None:
    names = {store.name for store in before}
    for store in full:
        if store.name not in names:
            _log.error(
                "broker_disk_full",
                store=store.name,
                free_bytes=store.free_bytes,
                min_free_bytes=store.min_free_bytes,
            )
    if before and not full:
        _log.info("broker_disk_has_room", stores=sorted(names))


def measure_folder(
    folder: Path,
    config: NatsConfig,
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
) -> list[FullStore]:
    """Return the store of an embedded broker in `folder` if its disk has too little free space.

    Raises Unavailable if the folder cannot be read.
    """
    try:
        disk = statvfs(folder)
    except OSError as error:
        raise Unavailable(f"the free space of {folder} is unknown: {error.strerror}") from error
    # The rest of the free blocks is reserved for root.
    free_bytes = disk.f_bavail * disk.f_frsize
    min_free_bytes = _min_free_bytes(config, disk.f_blocks * disk.f_frsize)
    is_full = free_bytes < min_free_bytes
    return [FullStore(config.store_dir, free_bytes, min_free_bytes)] if is_full else []


async def measure_servers(bus: Bus, config: NatsConfig) -> list[FullStore]:
    """Return the servers that have used too much of their `max_file_store`. Raises Unavailable."""
    try:
        servers = await read_servers(bus.connection, config.replicas)
    except NatsError as error:
        raise Unavailable(f"no server reports its storage: {error}") from error
    return list(_full_servers(servers, config))


def _full_servers(servers: list[dict[str, Any]], config: NatsConfig) -> Iterator[FullStore]:
    for server in servers:
        data = server.get("data", {})
        max_bytes = data.get("config", {}).get("max_storage", 0)
        # Streams may fill what is reserved for them. This must not refuse requests where the limit
        # of the server is hardly higher than the limits of its streams.
        unreserved_bytes = max(0, max_bytes - data.get("reserved_storage", 0))
        free_bytes = max_bytes - data.get("storage", 0)
        min_free_bytes = min(_min_free_bytes(config, max_bytes), unreserved_bytes)
        if free_bytes < min_free_bytes:
            yield FullStore(server["server"]["name"], free_bytes, min_free_bytes)


def _min_free_bytes(config: NatsConfig, total_bytes: int) -> int:
    """Return the free space that a disk of this size must have."""
    return max(int(total_bytes * config.min_free_percent / 100), config.min_free_mib * 2**20)
