"""Response bodies of `/v1/batches`. Pure."""

from typing import Literal

from msgspec import Struct

from shared.protocol.batch_log import LineError, Status


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
    """Reasons why the batch has failed, or why some lines have no result."""
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
