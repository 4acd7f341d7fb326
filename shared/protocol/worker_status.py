"""Answer of a worker's metrics listener to `/health` and `/ready`."""

import msgspec

from shared.protocol.encoding import or_none


class WorkerStatus(msgspec.Struct, frozen=True):
    """Body of an answer with the HTTP status 200 or 503."""

    role: str
    worker: str
    status: str
    version: str = ""
    reads: tuple[int, int] | None = None
    """Oldest and newest version of messages that the worker reads."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


decode_status = or_none(msgspec.json.Decoder(WorkerStatus).decode)
