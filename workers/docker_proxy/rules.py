"""The requests that the proxy accepts. Pure.

There are three of them, and none has a body: nothing that a client sends reaches the engine but the
name of a service and the number of a container, and both must exist.
"""

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Literal

from msgspec import Struct

from workers.docker_messages import Kind, Refusal

# Percent signs, further slashes and dots between slashes do not match.
_PATH = re.compile(rb"/services/([A-Za-z0-9][A-Za-z0-9._-]*)/workers(?:/([1-9][0-9]{0,5}))?")
_ACTIONS: Mapping[tuple[str, bool], Literal["list", "start", "stop"]] = {
    ("GET", False): "list",
    ("POST", False): "start",
    ("DELETE", True): "stop",
}


class Refused(Exception):
    """A request that the proxy does not carry out."""

    def __init__(self, status: HTTPStatus, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.refusal = Refusal(kind, message)


class Action(Struct, frozen=True):
    """An accepted request."""

    kind: Literal["list", "start", "stop"]
    service: str
    number: int = 0
    """Number of the container to stop."""


def read_action(
    method: str,
    raw_path: bytes,
    query: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    services: Iterable[str],
) -> Action:
    """Return what a request asks for. Raises Refused; `raw_path` is the path before decoding."""
    for name, value in headers:
        if name.lower() == b"transfer-encoding" or (
            name.lower() == b"content-length" and value.strip() != b"0"
        ):
            raise Refused(HTTPStatus.BAD_REQUEST, "body", "a request may have no body")
    if query:
        raise Refused(HTTPStatus.BAD_REQUEST, "query", "a request may have no query")
    if (match := _PATH.fullmatch(raw_path)) is None:
        raise Refused(
            HTTPStatus.NOT_FOUND,
            "path",
            "there are only the paths /services/SERVICE/workers and"
            " /services/SERVICE/workers/NUMBER",
        )
    service, number = match[1].decode(), match[2]
    if service not in services:
        raise Refused(
            HTTPStatus.FORBIDDEN,
            "service",
            f"no pool of scale.pools has the service {service!r}; there are:"
            f" {', '.join(sorted(services))}",
        )
    if (kind := _ACTIONS.get((method, number is not None))) is None:
        raise Refused(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "method",
            f"{method[:20]} is not allowed: workers can be listed (GET) and started (POST), and"
            " one of them stopped (DELETE)",
        )
    return Action(kind, service, int(number or 0))
