"""Records of batches. The log of a batch has a single writer, the batcher that has claimed it:

    Claimed → (Validated → (Results | Claimed)*)? → Ended

Claimed is repeated by each batcher that takes the batch over. The orders of the client, BatchBegun
and BatchCancelled, are on separate subjects, so they never contend with the writer of the log.

`index` counts the records of one log from 0 without a gap. Times are Unix seconds of the broker's
clock. Lines count from 1.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from shared.protocol.encoding import or_none
from shared.protocol.records import Usage

Status = Literal[
    "validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"
]
EndStatus = Literal["completed", "failed", "expired", "cancelled"]


class BatchBegun(Struct, frozen=True, omit_defaults=True):
    """Order of a client to run a batch."""

    batch_id: str
    tenant: str
    endpoint: str
    """Path of the endpoint that every line calls, such as `/v1/chat/completions`."""
    input_file: str
    """SHA-256 of the input file."""
    created_s: int
    window: str
    """Completion window as the client has written it, such as `24h`."""
    deadline_s: int
    """End of the window."""
    expires_s: int
    """Time from which the batch and its results are not stored any more."""
    metadata: dict[str, str] = {}


class BatchCancelled(Struct, frozen=True):
    """Order of a client to cancel a batch."""

    at_s: int


class Checkpoint(Struct, frozen=True, omit_defaults=True):
    """Progress of a batch up to and including the record that contains it.

    The last record of a log is thus enough to continue the batch.
    """

    num_lines: int = 0
    """Lines of the input; 0 before validation."""
    finished: bytes = b""
    """Finished lines, packed by `LineSet`."""
    next_line: int = 1
    """Line at which reading of the input continues. All earlier lines are finished."""
    next_offset: int = 0
    """Position of this line in the input, in bytes."""
    num_answered: int = 0
    """Lines in the output file."""
    num_refused: int = 0
    """Lines in the error file."""
    error_counts: dict[str, int] = {}
    """Lines in the error file by the code of their error."""
    usage: Usage = Usage(0, 0)
    output_bytes: int = 0
    error_bytes: int = 0
    began_s: int | None = None
    """Time of validation."""


class LineError(Struct, frozen=True):
    """Error in a line of the input."""

    code: str
    message: str
    line: int | None = None
    """None for an error of the whole file."""
    param: str | None = None


class Claimed(Struct, frozen=True, tag="claimed"):
    """A batcher has claimed the batch. Appends of any earlier batcher are refused from now on."""

    index: int
    at_s: int
    batcher: str
    checkpoint: Checkpoint


class Validated(Struct, frozen=True, tag="validated"):
    """All lines of the input are well formed."""

    index: int
    at_s: int
    checkpoint: Checkpoint


class Results(Struct, frozen=True, tag="results"):
    """Finished lines, in the order in which they ended."""

    index: int
    at_s: int
    output: list[Raw]
    """Lines of the output file."""
    errors: list[Raw]
    """Lines of the error file."""
    lines: list[int]
    """Numbers of the lines in `output`, followed by the numbers of the lines in `errors`."""
    checkpoint: Checkpoint


class BatchEnded(Struct, frozen=True, tag="ended"):
    """Last record of a log."""

    index: int
    at_s: int
    status: EndStatus
    checkpoint: Checkpoint
    errors: list[LineError] = []
    """Reasons why the batch has failed, or why some lines have no result."""
    removed: bool = False
    """Whether the client has deleted the results, which precede this record."""


BatchRecord = Claimed | Validated | Results | BatchEnded

_decoder = msgspec.json.Decoder(BatchRecord)
decode_batch_record = or_none(_decoder.decode)
decode_batch_begun = or_none(msgspec.json.Decoder(BatchBegun).decode)
decode_batch_cancelled = or_none(msgspec.json.Decoder(BatchCancelled).decode)


class BatchJob(Struct, frozen=True):
    """Message of the queue of batches. It stays there until the batch has ended."""

    batch_id: Annotated[str, Meta(max_length=64)]
    tenant: str


decode_batch_job = msgspec.json.Decoder(BatchJob).decode
