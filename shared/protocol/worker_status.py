"""What a worker's metrics listener answers to `/health` and `/ready`."""

import msgspec

from shared.protocol.encoding import or_none


class WorkerStatus(msgspec.Struct, frozen=True):
    """The body of an answer, whose HTTP status is 200 or 503."""

    role: str
    worker: str
    status: str
    version: str = ""
    reads: tuple[int, int] | None = None
    """The oldest and the newest version of messages that it reads."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


decode_status = or_none(msgspec.json.Decoder(WorkerStatus).decode)
