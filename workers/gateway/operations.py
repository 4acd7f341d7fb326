"""What the API answers: one table, of which the OpenAPI document and docs/api.md are made.

A test holds it equal to the routes that there are.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from shared.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidGrammar,
    InvalidMedia,
    InvalidRequest,
    LogTruncated,
    MediaBlocked,
    MediaNotFound,
    MediaTooLarge,
    NotFound,
    Overloaded,
    PagemillError,
    PayloadTooLarge,
    Poisoned,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
    UnsupportedContent,
    WorkerFailure,
)
from workers.gateway import errors, health, models, requests
from workers.gateway.answers import ChatChunk, ChatCompletion, Completion
from workers.gateway.openai import ChatRequest, CompletionRequest

Index = Annotated[int, Meta(ge=0)]


class Parameter(Struct, frozen=True):
    name: str
    place: str
    """`path`, `query` or `header`."""
    about: str
    type: Any = str


class Operation(Struct, frozen=True):
    method: str
    path: str
    tag: str
    summary: str
    answer: Any
    """A type of JSON, or a media type of something else."""
    body: Any = None
    """A type of JSON."""
    chunk: Any = None
    """What an event of the answer's stream carries, where there is one."""
    errors: tuple[type[PagemillError], ...] = ()
    """Beyond those of every operation."""
    parameters: tuple[Parameter, ...] = ()
    statuses: tuple[int, ...] = (200,)
    """With which it is answered."""
    public: bool = False
    """Without a key, too."""

    @property
    def refusals(self) -> dict[int, list[str]]:
        """Codes of errors, by their status."""
        found: set[type[PagemillError]] = {errors.HeadersTooLarge, WorkerFailure, *self.errors}
        if not self.public:
            found.add(errors.InvalidKey)
        if self.body is not None:
            found |= {InvalidRequest, *BODY}
        by_status: dict[int, list[str]] = {}
        for error in sorted(found, key=lambda error: error.code):
            by_status.setdefault(errors.status_of(error), []).append(error.code)
        return dict(sorted(by_status.items()))


BODY = (
    errors.BodyTooLarge,
    errors.TooSlow,
    errors.UnknownParameter,
    errors.UnsupportedParameter,
    errors.WrongContentType,
)
"""What may be wrong with any body."""

ANY_ANSWER = (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidGrammar,
    InvalidMedia,
    LogTruncated,
    MediaBlocked,
    MediaNotFound,
    MediaTooLarge,
    Overloaded,
    PayloadTooLarge,
    Poisoned,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
    UnsupportedContent,
    errors.RateLimited,
)
"""What a request may end with."""

OWN_ID = Parameter(
    "X-Request-Id",
    "header",
    "1 to 256 printable characters that name the request; the same again goes on with its answer",
)
IDEMPOTENCY_KEY = Parameter("Idempotency-Key", "header", "The same by another name, which wins")
LAST_EVENT = Parameter("Last-Event-ID", "header", "The last event that has been read of the stream")
FROM = Parameter("from", "query", "The first record that is to be read of the stream", Index)
STREAM = (OWN_ID, IDEMPOTENCY_KEY, LAST_EVENT, FROM)

OPERATIONS = [
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answers",
        "Answer a conversation, with pictures",
        ChatCompletion,
        ChatRequest,
        ChatChunk,
        ANY_ANSWER,
        STREAM,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Answers",
        "Go on with a prompt",
        Completion,
        CompletionRequest,
        Completion,
        ANY_ANSWER,
        STREAM,
    ),
    Operation(
        "GET",
        "/v1/requests/{id}",
        "Requests",
        "What has become of a request",
        requests.RequestBody,
        errors=(InvalidRequest, NotFound, Unavailable, LogTruncated),
    ),
    Operation(
        "GET",
        "/v1/requests/{id}/stream",
        "Requests",
        "Its answer once more, as events",
        None,
        chunk=Any,
        errors=(InvalidRequest, NotFound, *ANY_ANSWER),
        parameters=(LAST_EVENT, FROM),
    ),
    Operation(
        "DELETE",
        "/v1/requests/{id}",
        "Requests",
        "End a request, wherever it is",
        requests.Cancelling,
        errors=(InvalidRequest, NotFound, Unavailable),
        statuses=(202,),
    ),
    Operation("GET", "/v1/models", "Models", "The models that are served here", models.ModelList),
    Operation(
        "GET",
        "/v1/models/{model}",
        "Models",
        "One of them",
        models.ModelEntry,
        errors=(UnknownModel,),
    ),
    Operation("GET", "/health", "Server", "Whether the process lives", health.Health, public=True),
    Operation(
        "GET",
        "/ready",
        "Server",
        "Whether a request would be answered; status 503 if not",
        health.Ready,
        statuses=(200, 503),
        public=True,
    ),
    Operation("GET", "/version", "Server", "The version that runs", health.Version),
    Operation("GET", "/metrics", "Server", "Numbers of this gateway, for Prometheus", "text/plain"),
    Operation("GET", "/openapi.json", "Server", "This document", "application/json", public=True),
]
