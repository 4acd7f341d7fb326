"""Messages between an autoscaler and `pagemill docker-proxy`, as JSON over HTTP. Pure."""

from typing import Literal

import msgspec
from msgspec import Struct

Kind = Literal[
    "body", "query", "path", "method", "service", "worker", "max", "definition", "docker"
]


class DockerWorker(Struct, frozen=True, omit_defaults=True):
    """A container of a pool's service that runs, or that Docker starts again."""

    number: int
    """Compose's number of the container, from 1."""
    pid: int = 0
    """Process id on the host; 0 while Docker waits before it starts the container again."""
    draining: bool = False
    addresses: list[str] = []


class Refusal(Struct, frozen=True):
    """The body of an answer to a request that the proxy refuses, or that the engine refused."""

    kind: Kind
    """What is wrong: the part of the request, or the state that forbids it."""
    message: str


decode_workers = msgspec.json.Decoder(list[DockerWorker]).decode
decode_refusal = msgspec.json.Decoder(Refusal).decode
