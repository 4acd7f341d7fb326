"""One operation of the API, as the OpenAPI document and docs/api.md tell of it. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from shared.errors import InvalidRequest, PagemillError, WorkerFailure
from shared.protocol.messages import ErrorInfo
from workers.gateway.http import errors

ErrorLike = ErrorInfo | type[PagemillError]


class Parameter(Struct, frozen=True):
    name: str
    place: str
    """`path`, `query` or `header`."""
    about: str
    type: Any = str


class ApiOperation(Struct, frozen=True):
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
    refuses: tuple[type[PagemillError], ...] = ()
    """With these, beside those of every operation."""
    parameters: tuple[Parameter, ...] = ()
    statuses: tuple[int, ...] = (200,)
    """With which it is answered."""
    public: bool = False
    """Without a key, too."""
    counted: bool = False
    """For the limits of the key."""
    status_of: Callable[[ErrorLike], int] = errors.status_of

    @property
    def refusals(self) -> dict[int, list[str]]:
        """Codes of errors, by their status."""
        found: set[type[PagemillError]] = {errors.HeadersTooLarge, WorkerFailure, *self.refuses}
        if not self.public:
            found.add(errors.InvalidKey)
        if self.counted:
            found.add(errors.RateLimited)
        if self.body is not None:
            found |= {InvalidRequest, *BODY}
        by_status: dict[int, list[str]] = {}
        for error in sorted(found, key=lambda error: error.code):
            by_status.setdefault(self.status_of(error), []).append(error.code)
        return dict(sorted(by_status.items()))


BODY = (
    errors.BodyTooLarge,
    errors.RequestTimeout,
    errors.UnknownParameter,
    errors.UnsupportedParameter,
    errors.WrongContentType,
)
"""What may be wrong with any body."""


def is_type(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, str)


def types_of(operations: Iterable[ApiOperation]) -> list[Any]:
    """Everything that has a schema, each once."""
    found = (t for o in operations for t in (o.body, o.answer, o.chunk) if is_type(t))
    return list({repr(one): one for one in found}.values())
