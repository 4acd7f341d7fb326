"""Requests that coordinators answer about stored answers, and their replies. All are JSON.

ReadRequest       → LogPage | ErrorReply          pm.read.<id>
(empty)           → RequestStatus | ErrorReply    pm.state.<id>
ResultsRequest    → LogPage | ErrorReply          pm.results.<id of a batch>
FileRequest       → FilePage | ErrorReply         pm.file.<sha256>
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from shared.protocol.encoding import ClientDecoder
from shared.protocol.pipeline import TEXT
from shared.protocol.records import StageSpan

MAX_REQUEST_BYTES = 2**12
"""Limit on a request, which has few fields."""
MAX_PAGE_BYTES = 2**20
MAX_RECORDS = 256
"""Limit on the records of a page, each of which takes a coordinator tens of microseconds."""

Position = Annotated[int, Meta(ge=0, le=2**53 - 1)]
PageBytes = Annotated[int, Meta(ge=1, le=MAX_PAGE_BYTES)]


class ReadRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request for a page of a token log. An empty message is a request with all defaults."""

    start: Position = msgspec.field(name="from", default=0)
    """`index` of the first record to read."""
    max_bytes: PageBytes = 2**18
    """Limit on the size of all records of the page. One record may be larger."""
    output: str = TEXT
    """Output of the request. Each output has a separate log."""


class ResultsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request for a page of a batch's log. An empty message is a request with all defaults."""

    start: Position = msgspec.field(name="from", default=0)
    """`index` of the first record to read."""
    max_bytes: PageBytes = 2**18
    """Limit on the size of all records of the page. One record may be larger."""


class LogPage(Struct, frozen=True):
    """Page of a token log, or of the log of a batch."""

    records: list[Raw]
    """At most 256 consecutive records, each as live readers get it. The page is empty if the log
    has no further record yet."""
    next: int
    """`index` of the next record, for the next request and for live records."""
    ended: bool
    """Whether the log has ended, and has no record after this page."""


class FileRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request for a page of a stored file. An empty message is a request with all defaults."""

    start: Position = msgspec.field(name="from", default=0)
    """Position of the first byte to read."""
    max_bytes: PageBytes = 2**18
    """Limit on the bytes of the page."""


class FilePage(Struct, frozen=True):
    """Page of a stored file."""

    data: bytes
    """Bytes of the file, as base64."""
    next: int
    """Position of the next byte, for the next FileRequest."""
    num_bytes: int
    """Size of the whole file."""
    ended: bool
    """Whether the file has no byte after this page."""


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
    """In the reply to a client: the id as the client wrote it."""
    state: State
    model: str | None = None
    """null if neither a queue nor an attempt names it any more."""
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

    @property
    def has_ended(self) -> bool:
        return self.state in ("finished", "failed")


decode_read_request = ClientDecoder(ReadRequest)
decode_results_request = ClientDecoder(ResultsRequest)
decode_file_request = ClientDecoder(FileRequest)
