"""All errors that can reach a client, with their machine-readable codes.

The text of an error is written where the error is raised. `workers.gateway.http.errors` has the
errors of HTTP alone, and the general texts that replace the server's own faults there.

`fault` names the party that has caused an error, the client or the server. An error is `retryable`
if another attempt may succeed.

PagemillError               internal_error; server; not retryable
├── RequestError            client; not retryable, because the same request would fail again
│   ├── InvalidRequest      a field is missing, unknown, of a wrong type or out of range
│   ├── UnknownModel        no such model is configured
│   ├── UnknownAdapter      the model has no adapter of this name
│   ├── UnsupportedContent  the model has no stage for a content part
│   ├── InvalidGrammar      a schema, expression or grammar cannot constrain answers
│   ├── InvalidMedia        a file cannot be read, fetched or decoded
│   ├── MediaBlocked        media may not be fetched from this address
│   ├── MediaTooLarge       a file is over a limit, such as on bytes, pixels, seconds or number
│   ├── MediaNotFound       a file named by its hash is not stored
│   ├── MMCacheMiss         an item named only by its hash is not cached
│   ├── ContextTooLong      prompt and answer do not fit into the model's context
│   ├── PayloadTooLarge     a message is over the broker's limit
│   ├── TokenRateExceeded   the tenant has used its tokens of this minute; its client may try again
│   ├── QuotaExceeded       the tenant is over its share of storage; its client may try again later
│   └── Cancelled           the client has cancelled the request
├── DecodeError             client; bytes on a subject are not a valid message; not retryable
├── ServerError             server; retryable
│   ├── Unavailable         the broker or a storage does not answer
│   ├── StoreInUse          another process has the store of the embedded broker open
│   ├── DiskFull            a disk has too little free space; only its client may try again
│   ├── Overloaded          a work queue is full; the client may try again later
│   │   └── StageBusy       a task of a stage has waited for too long; only its client retries
│   ├── GrammarNotTried     no time or process for the trial of a grammar; only its client retries
│   ├── EncodingFailed      embeddings could not be computed; Pagemill does not retry
│   ├── OutOfMemory         a device has too little memory for this request; only its client retries
│   ├── BlobLost            a payload is lost with its owner; its stage runs again
│   ├── DeadlineExceeded    the request has reached its deadline; only its client may retry it
│   ├── UnsupportedVersion  a message needs a newer reader; a newer worker claims it
│   ├── ToolsUnavailable    a server whose tools a response must call does not answer
│   └── WorkerFailure       a worker failed on this request
├── LogTruncated            server; a token log has lost its beginning and cannot be resumed
├── NumberOverflow          server; a model computes values that are not finite; not retryable
├── Poisoned                server; workers died with this request in flight; not retryable
├── ToolFailure             server; a response cannot continue because of its tools; not retryable
├── NotFound                client; there is no such request, dead letter or model on a hub
├── AccessDenied            client; a hub refuses access to this model
├── CorruptDownload         server; a file does not have the hub's checksum or length; retryable
├── Fenced                  server; another writer has appended to this token log
└── ConfigError             server; a configuration value is invalid; names file, key and type
"""

from typing import Literal

Fault = Literal["client", "server"]


# A message may quote a client's input, and must still fit into a record of the token log.
MAX_MESSAGE_LEN = 1000
MAX_FIELD_LEN = 200


def _size(num_bytes: int) -> str:
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} bytes"


class PagemillError(Exception):
    """Base of all errors. `field` names the invalid input."""

    code: str = "internal_error"
    """Stable machine-readable code."""
    fault: Fault = "server"
    retryable: bool = False
    """Whether another attempt may succeed."""
    retry_after_s: float | None = None
    """Delay after which a client may try again."""
    reported: bool = False
    """Whether the error comes from the bus: another process has reported it, or the bus refuses a
    message. `field` is then a field of the message."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = truncate(message, MAX_MESSAGE_LEN)
        self.field = None if field is None else truncate(field, MAX_FIELD_LEN)


def truncate(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


class RequestError(PagemillError):
    code = "invalid_request"
    fault = "client"


class InvalidRequest(RequestError):
    code = "invalid_request"


class UnknownModel(RequestError):
    code = "unknown_model"


class UnknownAdapter(RequestError):
    code = "unknown_adapter"


class UnsupportedContent(RequestError):
    code = "unsupported_content"


class InvalidGrammar(RequestError):
    code = "invalid_grammar"


class InvalidMedia(RequestError):
    code = "invalid_media"


class MediaBlocked(RequestError):
    code = "media_url_blocked"


class MediaTooLarge(RequestError):
    code = "media_too_large"


class MediaNotFound(RequestError):
    code = "media_not_found"


class MMCacheMiss(RequestError):
    code = "mm_cache_miss"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class PayloadTooLarge(RequestError):
    code = "payload_too_large"


class TokenRateExceeded(RequestError):
    code = "token_rate_exceeded"
    retryable = True

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = wait_s


class QuotaExceeded(RequestError):
    code = "storage_quota_exceeded"
    retryable = True
    retry_after_s = 60.0


class TooManyBatches(RequestError):
    """A tenant has as many unfinished batches as it may have."""

    code = "too_many_batches"
    retryable = True
    retry_after_s = 60.0


class Cancelled(RequestError):
    code = "cancelled"


class DecodeError(PagemillError):
    code = "undecodable_message"
    fault = "client"


class ServerError(PagemillError):
    retryable = True


class Unavailable(ServerError):
    code = "unavailable"


class StoreInUse(ServerError):
    code = "store_in_use"


class DiskFull(ServerError):
    code = "disk_full"
    retry_after_s = 30.0

    @classmethod
    def of(cls, place: str, free_bytes: int, needed_bytes: int, remedy: str) -> "DiskFull":
        """Return the error for a place with too little free space."""
        numbers = f"{_size(free_bytes)} free, and needs {_size(needed_bytes)}"
        return cls(f"{place} has {numbers}: {remedy}")


class Overloaded(ServerError):
    code = "overloaded"
    retry_after_s = 1.0


class StageBusy(Overloaded):
    retry_after_s = 5.0


class GrammarNotTried(ServerError):
    code = "grammar_not_tried"
    retry_after_s = 5.0


class EncodingFailed(ServerError):
    code = "encoding_failed"


class OutOfMemory(ServerError):
    code = "out_of_memory"


class BlobLost(ServerError):
    code = "blob_lost"


class DeadlineExceeded(ServerError):
    code = "deadline_exceeded"


class UnsupportedVersion(ServerError):
    code = "unsupported_version"
    retry_after_s = 5.0


class ToolsUnavailable(ServerError):
    code = "tools_unavailable"
    retry_after_s = 5.0


class WorkerFailure(ServerError):
    code = "worker_failure"


class LogTruncated(PagemillError):
    code = "log_truncated"


class NumberOverflow(PagemillError):
    code = "number_overflow"


class Poisoned(PagemillError):
    code = "poison"


class ToolFailure(PagemillError):
    code = "tool_failure"


class NotFound(PagemillError):
    code = "not_found"
    fault = "client"


class AccessDenied(PagemillError):
    code = "access_denied"
    fault = "client"


class CorruptDownload(PagemillError):
    code = "corrupt_download"
    retryable = True


class Fenced(PagemillError):
    code = "fenced"


class ConfigError(PagemillError):
    code = "invalid_configuration"


def first_sentence(error: Exception) -> str:
    """Return the first line of an error's text, with the next one if it announces that.

    An error without a text, or with the name of a key alone, has its type.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
