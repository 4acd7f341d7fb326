"""The manifest of a backup: which streams it has, in which order, and the checksum of each part."""

from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest
from shared.protocol import subjects

MANIFEST_FILE = "manifest.json"
FORMAT = 1

# A queue is copied before the logs of what it asks for. So a log is newer than its queue: work that
# ended in between is in the queue without harm, because its log says that it has ended. In the
# other order it would be in neither. Images come after the requests that name them, and letters
# after the logs that end with an error.
ORDER = (
    subjects.RESPONSES_STREAM,
    subjects.CANCELS_STREAM,
    subjects.REQUESTS_STREAM,
    subjects.TOKENS_STREAM,
    subjects.STEPS_STREAM,
    subjects.MEDIA_STREAM,
    subjects.JOBS_STREAM,
    subjects.DEAD_STREAM,
    subjects.SCALE_STREAM,
    subjects.AUDIT_STREAM,
)
# The claims on messages of a queue are those of workers that will be gone. Without its consumers,
# all of a restored queue is delivered anew.
QUEUES = (subjects.RESPONSES_STREAM, subjects.CANCELS_STREAM, subjects.REQUESTS_STREAM)
# Made of the others: coordinators publish the tasks of all queued requests again.
DERIVED = (
    subjects.STAGES_STREAM,
    subjects.ATTEMPTS_STREAM,
    subjects.RESULTS_STREAM,
    subjects.KV_STREAM,
    subjects.WORKERS_STREAM,
)
# Logs of what queues ask for. Their ends may belong to work that was accepted after its queue was
# copied.
LOGS = (subjects.TOKENS_STREAM, subjects.STEPS_STREAM)


class StreamPart(Struct, frozen=True):
    """One stream of a backup."""

    stream: str
    file: str
    messages: int
    """Messages when the snapshot began. A queue may have lost some of them while it was copied."""
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
    """What is in a backup."""

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
    """Raises InvalidRequest for bytes that are no manifest, or of another format."""
    try:
        found = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{MANIFEST_FILE}: {error}", field="format") from error
    if found.format != FORMAT:
        raise InvalidRequest(
            f"{MANIFEST_FILE}: format {found.format}; this version reads format {FORMAT}",
            field="format",
        )
    for part in found.parts:
        if part.stream not in ORDER or part.file != file_of(part.stream):
            raise InvalidRequest(
                f"{MANIFEST_FILE}: stream {part.stream!r} in {part.file!r} is no part of a backup",
                field="parts",
            )
    return found


def file_of(stream: str) -> str:
    """Name of the file with a stream's snapshot."""
    return f"{stream}.snapshot"
