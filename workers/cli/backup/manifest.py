"""Manifest of a backup: its streams, their order, and the checksum of each part."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest
from shared.helpers.validation import reason_of
from shared.protocol import subjects

MANIFEST_FILE = "manifest.json"
FORMAT = 1

# A queue is copied before the logs of its requests, so each log is newer than its queue. A request
# that ends between the two copies is harmless in the queue, because its log contains the end. In
# the other order it could be missing from both. Images come after the requests that name them, and
# dead letters after the logs that end with an error.
ORDER = (
    subjects.RESPONSES_STREAM,
    subjects.BATCHJOBS_STREAM,
    subjects.CANCELS_STREAM,
    subjects.REQUESTS_STREAM,
    subjects.TOKENS_STREAM,
    subjects.STEPS_STREAM,
    subjects.BATCHES_STREAM,
    subjects.MEDIA_STREAM,
    subjects.JOBS_STREAM,
    subjects.DEAD_STREAM,
    subjects.SCALE_STREAM,
    subjects.AUDIT_STREAM,
)
# Queues are restored without their consumers: claims on messages belong to workers that no longer
# exist, and so every message is delivered again.
QUEUES = (
    subjects.RESPONSES_STREAM,
    subjects.BATCHJOBS_STREAM,
    subjects.CANCELS_STREAM,
    subjects.REQUESTS_STREAM,
)
# Streams that are not copied: coordinators publish the tasks of all queued requests again.
DERIVED = (
    subjects.STAGES_STREAM,
    subjects.ATTEMPTS_STREAM,
    subjects.RESULTS_STREAM,
    subjects.KV_STREAM,
    subjects.WORKERS_STREAM,
)
# Logs of queued requests, responses and batches. Their last messages may belong to requests that
# were accepted after the queue was copied.
LOGS = (subjects.TOKENS_STREAM, subjects.STEPS_STREAM, subjects.BATCHES_STREAM)


def kind_of(stream: str) -> str:
    """Return the name in `ORDER` for a stream, which may be the queue of a tenant."""
    return stream.partition("_")[0] if subjects.tenant_of_queue(stream) else stream


def in_order(queues: Iterable[str]) -> list[str]:
    """Return the streams of a backup with these queues of tenants, in their order."""
    return sorted((*ORDER, *queues), key=lambda stream: ORDER.index(kind_of(stream)))


class StreamPart(Struct, frozen=True):
    """One stream of a backup."""

    stream: str
    file: str
    messages: int
    """Messages when the snapshot began. Some of a queue may have been deleted during the copy."""
    bytes: int
    """Bytes of these messages in the broker."""
    size: int
    """Bytes of the file."""
    sha256: str
    config: dict[str, Any]
    """Configuration of the stream, as the broker returned it."""
    state: dict[str, Any]
    """State of the stream, as the broker returned it."""


class Manifest(Struct, frozen=True):
    """Contents of a backup."""

    format: int
    version: str
    """Version of Pagemill."""
    server: str
    """Version of the nats-server."""
    began_s: int
    """Unix time of the broker's clock."""
    log_ends: dict[str, int]
    """Last sequence of each stream of logs, before any queue was copied."""
    parts: list[StreamPart]


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest. Raises InvalidRequest for other bytes, or another format."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{MANIFEST_FILE}: {reason_of(error)}", field="format") from error
    if manifest.format != FORMAT:
        raise InvalidRequest(
            f"{MANIFEST_FILE}: format {manifest.format}; this version reads format {FORMAT}",
            field="format",
        )
    for part in manifest.parts:
        if kind_of(part.stream) not in ORDER or part.file != file_of(part.stream):
            raise InvalidRequest(
                f"{MANIFEST_FILE}: stream {part.stream!r} in {part.file!r} is not part of a backup",
                field="parts",
            )
    return manifest


def file_of(stream: str) -> str:
    """Return the name of the file with a stream's snapshot."""
    return f"{stream}.snapshot"
