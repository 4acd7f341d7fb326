"""Status of a request, for commands and gateways."""

from typing import Literal

from msgspec import Struct

from shared.protocol.records import StageSpan

State = Literal["unknown", "queued", "running", "finished", "failed"]
Outcome = Literal["open", "requeued", "failed", "done", "superseded", "ended"]


class Attempt(Struct, frozen=True):
    """Attempt of a worker at a request, with the fields of an AttemptRecord.

    An attempt without a second record is `done` if the request continued from it, `superseded` if
    its stage has a later attempt, and `ended` if the request ended without it. Otherwise it is
    `open`.
    """

    stage: str
    worker: str
    number: int
    began_ms: float
    log_len: int
    outcome: Outcome = "open"


class RequestStatus(Struct, frozen=True):
    """Status of a request, as `pagemill where` shows it."""

    request_id: str
    state: State
    stage: str | None = None
    worker: str | None = None
    attempt: int | None = None
    waits_s: float | None = None
    """Time in the current stage so far."""
    records: int = 0
    """Number of records in the token log."""
    why: str = ""
    error_code: str | None = None
    """Code of the error; None unless the request has failed."""
    attempts: list[Attempt] = []
    path: list[StageSpan] = []
    """Previous stages."""
    pool: str | None = None
    """State of the stage's pool, if an autoscaler leads and the pool has no worker."""
    num_unread: int = 0
    """Number of requests that wait for a coordinator. An unknown request may be one of them."""

    @property
    def has_ended(self) -> bool:
        return self.state in ("finished", "failed")
