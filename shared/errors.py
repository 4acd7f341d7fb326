"""Every error that can reach a client, and whose fault it is.

PagemillError
├── RequestError            the client's fault; the same request fails again, so it is never retried
│   ├── InvalidRequest      a field is missing, unknown, of a wrong type or out of its range
│   ├── UnknownModel        no such model is configured here
│   ├── UnknownAdapter      the model has no adapter of that name here
│   ├── UnsupportedContent  a content part that the model has no stage for
│   ├── InvalidGrammar      a schema, expression or grammar that answers cannot be held to
│   ├── InvalidMedia        a picture that cannot be read, fetched or decoded
│   ├── MediaBlocked        a picture from a place that pictures are not fetched from
│   ├── MediaTooLarge       a picture over the byte, pixel or count limit
│   ├── MediaNotFound       a picture that is named by its hash, and is not stored here
│   ├── MMCacheMiss         an item that is named by its hash alone, and is not known here
│   ├── ContextTooLong      prompt and answer do not fit the model's context
│   ├── PayloadTooLarge     a message over the broker's limit
│   └── Cancelled           somebody asked for it
├── DecodeError             bytes on a subject are not what the subject carries; never retried
├── ServerError             our fault; another attempt may succeed
│   ├── Unavailable         the broker or the storage does not answer
│   ├── Overloaded          a work queue is at its limit; try again later
│   ├── EncodingFailed      a picture's embeddings could not be made; not tried again here
│   ├── BlobLost            a payload is gone with its owner; the stage that makes it runs again
│   ├── DeadlineExceeded    the request's time is over; not retried here, but the client may
│   └── WorkerFailure       a worker failed on this request
├── LogTruncated            a token log has lost its beginning, so nobody can go on with it
├── Poisoned                workers died with this request in hand; never retried
├── NotFound                no such request or dead letter
├── Fenced                  somebody else has written to this token log: stop, say nothing
└── ConfigError             a configuration value is wrong; names file, key and type
"""

from typing import ClassVar, Literal

Fault = Literal["client", "server"]


# What a client sent may be part of a message; it must still fit into a record of the token log.
MAX_MESSAGE_LEN = 1000
MAX_FIELD_LEN = 200


class PagemillError(Exception):
    """Base of all; `code` is stable and machine-readable, `field` names the offending input."""

    code: ClassVar[str] = "internal_error"
    fault: ClassVar[Fault] = "server"
    retryable: ClassVar[bool] = False

    retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = _cut(message, MAX_MESSAGE_LEN)
        self.field = None if field is None else _cut(field, MAX_FIELD_LEN)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


class RequestError(PagemillError):
    code = "invalid_request"
    fault = "client"


class InvalidRequest(RequestError):
    pass


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


class Cancelled(RequestError):
    code = "cancelled"


class DecodeError(PagemillError):
    code = "undecodable_message"
    fault = "client"


class ServerError(PagemillError):
    retryable = True


class Unavailable(ServerError):
    code = "unavailable"


class Overloaded(ServerError):
    code = "overloaded"
    retry_after_s = 1.0


class EncodingFailed(ServerError):
    code = "encoding_failed"


class BlobLost(ServerError):
    code = "blob_lost"


class DeadlineExceeded(ServerError):
    code = "deadline_exceeded"


class WorkerFailure(ServerError):
    code = "worker_failure"


class LogTruncated(PagemillError):
    code = "log_truncated"


class Poisoned(PagemillError):
    code = "poison"


class NotFound(PagemillError):
    code = "not_found"
    fault = "client"


class Fenced(PagemillError):
    code = "fenced"


class ConfigError(PagemillError):
    code = "invalid_configuration"
