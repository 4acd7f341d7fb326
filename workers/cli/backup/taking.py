"""Taking a backup: a snapshot of each stream, while workers and clients continue."""

import hashlib
from collections.abc import Callable

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.snapshots import StreamSnapshots
from shared.errors import NotFound
from shared.protocol.encoding import to_json
from shared.stage.runtime import VERSION
from workers.cli.backup.archive import Archive
from workers.cli.backup.manifest import (
    FORMAT,
    LOGS,
    MANIFEST_FILE,
    QUEUES,
    Manifest,
    StreamPart,
    file_of,
    in_order,
    kind_of,
)

Progress = Callable[[str, int, int], None]
"""Called with a stream, its number of copied bytes, and its total number of bytes."""


async def take_backup(bus: Bus, archive: Archive, progress: Progress) -> Manifest:
    """Write all streams and the manifest, in this order.

    Raises NotFound for a broker without streams of Pagemill, and Unavailable.
    """
    began_s = int(bus.now_ms() / 1000)
    snapshots = StreamSnapshots(bus)
    queues = [
        stream
        for stream in await request_queue.streams_of_tenants(bus)
        if (await bus.figures.size(stream))[0]
    ]
    streams = await snapshots.streams_among(in_order(queues))
    if not streams:
        raise NotFound("the broker has no streams of Pagemill: nothing to back up")
    log_ends = {
        name: (await bus.figures.sequence_range(name))[1] for name in LOGS if name in streams
    }
    parts = [await _take(snapshots, archive, stream, progress) for stream in streams]
    manifest = Manifest(FORMAT, VERSION, bus.connection.server_version, began_s, log_ends, parts)
    with archive.write(MANIFEST_FILE) as file:
        file.write(to_json(manifest))
    return manifest


async def _take(
    snapshots: StreamSnapshots, archive: Archive, stream: str, progress: Progress
) -> StreamPart:
    digest, size, name = hashlib.sha256(), 0, file_of(stream)
    async with snapshots.open_snapshot(
        stream, with_consumers=kind_of(stream) not in QUEUES
    ) as snapshot:
        num_bytes = int(snapshot.state["bytes"])
        with archive.write(name) as file:
            async for chunk in snapshot.chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                # Snapshots are compressed, so their size is only an estimate of the copied bytes.
                progress(stream, min(size, num_bytes), num_bytes)
    progress(stream, num_bytes, num_bytes)
    return StreamPart(
        stream,
        name,
        int(snapshot.state["messages"]),
        num_bytes,
        size,
        digest.hexdigest(),
        snapshot.config,
        snapshot.state,
    )
