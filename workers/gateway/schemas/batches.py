"""Request and response bodies of `/v1/batches`. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.protocol.batch_log import LineError, Status
from workers.gateway.schemas.files import Life

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class OutputExpiry(Struct, frozen=True, forbid_unknown_fields=True):
    seconds: Life
    """Seconds for which the results are stored after the end of the window, at most for
    `batch.ttl_s` after the batch was created."""
    anchor: Literal["created_at"] = "created_at"


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    input_file_id: str
    """Id of a file of JSON lines with the purpose `batch`."""
    endpoint: str
    """Path of the endpoint that each line calls, such as `/v1/chat/completions`."""
    completion_window: Annotated[str, Meta(max_length=16)]
    """Time in which the batch must end: a number with `m`, `h` or `d`, such as `24h`, up to
    `batch.max_window_h`. Lines without a result then get the error `batch_expired`."""
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchCounts(Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    """Lines with an answer."""
    failed: int
    """Lines with an error."""


class BatchInputDetails(Struct, frozen=True):
    cached_tokens: int


class BatchOutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails = BatchOutputDetails()
    total_tokens: int


class BatchErrors(Struct, frozen=True, kw_only=True):
    data: list[LineError]
    """The first 100 errors of the input."""
    object: Literal["list"] = "list"


class BatchBody(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    """Unix seconds, as all other times."""
    expires_at: int
    """End of the window."""
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    """File with the answers, if the batch has ended with any."""
    error_file_id: str | None = None
    """File with the lines that have an error in place of an answer, if there are any."""
    errors: BatchErrors | None = None
    """Reasons why the batch has failed."""
    request_counts: BatchCounts
    error_counts: dict[str, int]
    """Lines with an error, by its code."""
    usage: BatchUsage
    metadata: dict[str, str] | None = None


class BatchList(Struct, frozen=True, kw_only=True):
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
