"""Restore of a backup into a broker: checks the backup, writes each stream, repairs the records."""

import hashlib
from collections.abc import Iterable, Iterator

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.heartbeats import DEAD_AFTER_S
from shared.bus.snapshots import StreamSnapshots
from shared.errors import InvalidRequest
from shared.protocol import subjects
from workers.cli.backup.archive import Archive, read_parts
from workers.cli.backup.manifest import (
    DERIVED,
    MANIFEST_FILE,
    ORDER,
    Manifest,
    StreamPart,
    decode_manifest,
)
from workers.cli.backup.partners import Mended, mend
from workers.cli.backup.taking import Progress

# Far more than the configurations of the streams, the longest part of a manifest. Each tenant with
# queued requests has two streams.
MAX_MANIFEST_BYTES = 8 * 2**20
MAX_NAMED = 5


def check_archive(archive: Archive) -> Manifest:
    """Check that every part is complete, and return the manifest. Raises InvalidRequest."""
    with archive.open(MANIFEST_FILE) as file:
        manifest = decode_manifest(file.read(MAX_MANIFEST_BYTES))
    for part in manifest.parts:
        digest, size = hashlib.sha256(), 0
        with archive.open(part.file) as file:
            for data in read_parts(file):
                digest.update(data)
                size += len(data)
        if size != part.size or digest.hexdigest() != part.sha256:
            raise InvalidRequest(
                f"{part.file} is damaged: it has {size} bytes with SHA-256 {digest.hexdigest()},"
                f" and the manifest has {part.size} bytes with {part.sha256}",
                field=part.file,
            )
    return manifest


async def check_target(bus: Bus, *, replace: bool) -> list[str]:
    """Return the streams to remove first. Raises InvalidRequest for a broker in use."""
    # A restore must not remove records of the audit log.
    ours = *ORDER, *DERIVED, *await request_queue.streams_of_tenants(bus)
    removable = [stream for stream in ours if stream != subjects.AUDIT_STREAM]
    existing = await StreamSnapshots(bus).streams_among(removable)
    if subjects.WORKERS_STREAM in existing and (living := await _living(bus)):
        names = ", ".join(living[:MAX_NAMED])
        raise InvalidRequest(f"{len(living)} workers run ({names}): stop all of them first")
    if existing and not replace:
        raise InvalidRequest(
            f"the broker has streams of Pagemill ({', '.join(existing)}): --replace removes them"
        )
    return existing


async def _living(bus: Bus) -> list[str]:
    """Return the workers with a recent heartbeat."""
    since_ms = bus.now_ms() - 1000 * DEAD_AFTER_S
    beats = await bus.read(subjects.WORKERS_STREAM, subjects.WORKERS_FILTER)
    return sorted({subjects.last_token(m.subject) for m in beats if m.stored_ms > since_ms})


async def restore(
    bus: Bus,
    archive: Archive,
    manifest: Manifest,
    existing: Iterable[str],
    replicas: int,
    progress: Progress,
) -> Mended:
    """Replace the broker's streams with the streams of a checked archive. Raises Unavailable."""
    snapshots = StreamSnapshots(bus)
    for stream in existing:
        await snapshots.remove_stream(stream)
    remaining = await snapshots.streams_among([subjects.AUDIT_STREAM])
    for part in manifest.parts:
        if part.stream in remaining:
            continue
        config = part.config | {"num_replicas": replicas}
        with archive.open(part.file) as file:
            data = _counted(read_parts(file), part, progress)
            await snapshots.restore_snapshot(part.stream, config, part.state, data)
        progress(part.stream, part.bytes, part.bytes)
    return await mend(bus, manifest.log_ends)


def _counted(parts: Iterable[bytes], part: StreamPart, progress: Progress) -> Iterator[bytes]:
    done = 0
    for data in parts:
        yield data
        done += len(data)
        progress(part.stream, part.bytes * done // max(part.size, 1), part.bytes)
