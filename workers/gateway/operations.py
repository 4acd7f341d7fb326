"""What the API answers: one table, of which the OpenAPI document and docs/api.md are made.

A test holds it equal to the routes that there are.
"""

from typing import Any

from msgspec import Struct

from shared.errors import InvalidRequest, PagemillError, UnknownModel, WorkerFailure
from workers.gateway import errors, health, models


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
    also: tuple[int, ...] = ()
    """Statuses with the same answer, beside 200."""
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

OPERATIONS = [
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
        also=(503,),
        public=True,
    ),
    Operation("GET", "/version", "Server", "The version that runs", health.Version),
    Operation("GET", "/metrics", "Server", "Numbers of this gateway, for Prometheus", "text/plain"),
    Operation("GET", "/openapi.json", "Server", "This document", "application/json", public=True),
]
