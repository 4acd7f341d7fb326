"""Ids of requests, of their parts on the bus, and of the events of their streams."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from shared.errors import InvalidRequest
from shared.protocol import names
from shared.protocol.messages import RequestRecord
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.schemas.generate import MAX_ID_LEN

_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,256}")


def named_request_id(kind: AnswerKind[Any], name: str) -> str:
    """Return the id of the request that a client calls `name`, without its tenant.

    A name that is valid in a subject is the id itself, as for a client of the bus. Any other name
    has a digest.
    """
    if names.is_request_id(name):
        return name
    return f"{kind.id_prefix}-{hashlib.sha256(f'{kind.name}:{name}'.encode()).hexdigest()}"


def read_request_id(request: Request, kind: AnswerKind[Any]) -> tuple[str, bool]:
    """Return the request's id without its tenant, and whether the client has chosen it.

    The same name from the same tenant means the same request. The id is stored in the scope of the
    HTTP request, so every later response has it in a header, also an error. Raises InvalidRequest.
    """
    identity: tuple[str, bool] | None = request.scope.get("request_id")
    if identity is None:
        identity = request.scope["request_id"] = _find_request_id(request, kind)
    return identity


def _find_request_id(request: Request, kind: AnswerKind[Any]) -> tuple[str, bool]:
    name = request.headers.get("idempotency-key") or request.headers.get("x-request-id")
    if name is None:
        return f"{kind.id_prefix}-{secrets.token_hex(8)}", False
    if _CLIENT_ID.fullmatch(name) is None:
        raise InvalidRequest(
            f"a request id is 1 to {MAX_ID_LEN} printable characters", field="X-Request-Id"
        )
    return named_request_id(kind, name), True


def part_ids(request_id: str, record: RequestRecord) -> list[str]:
    """Return the ids of the request's parts on the bus, one for each prompt."""
    parts = record.num_parts
    return [request_id] if parts == 1 else [names.part_id(request_id, i) for i in range(parts)]


def format_event_id(position: Sequence[int]) -> str:
    """Return the id of an event: the number of the last event from each log.

    A stream can resume after the event with this id.
    """
    return ",".join(map(str, position))


def read_start(request: Request, num_logs: int) -> list[int]:
    """Return the number of the first event to send, for each log. Raises InvalidRequest."""
    last_id, start = request.headers.get("last-event-id"), request.query_params.get("from")
    text, field = (start, "from") if last_id is None else (last_id, "Last-Event-ID")
    if not text:
        return [0] * num_logs
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= num_logs if field == "from" else 1
    if len(numbers) != num_logs or min(numbers) < -1 or max(numbers) >= 2**53:
        raise InvalidRequest(f"{field} is not an event id of this stream", field=field)
    return [number + (last_id is not None) for number in numbers]


def wants_event_ids(request: Request, record: RequestRecord) -> bool:
    """Return whether the events of a stream have ids.

    A client that does not use them may reject an event with an id: some expect nothing but OpenAI's
    `data:` lines, for example vLLM's load client.
    """
    return (
        record.durable
        or "text/event-stream" in request.headers.get("accept", "")
        or "last-event-id" in request.headers
        or "from" in request.query_params
    )
