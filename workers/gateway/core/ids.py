"""Ids: of requests, of their parts on the bus, and of the events of their streams."""

import hashlib
import re
import secrets
from collections.abc import Sequence

from starlette.requests import Request

from shared.errors import InvalidRequest
from shared.protocol.messages import RequestRecord
from workers.gateway.schemas.generate import MAX_ID_LEN

PREFIXES = {"chat": "chatcmpl", "completion": "cmpl", "generate": "gen"}

_OWN_ID = re.compile(r"[\x21-\x7e]{1,256}")


def named_request_id(kind: str, tenant: str, name: str) -> str:
    """Of the request that a tenant calls by `name`: nobody can name another tenant's."""
    digest = hashlib.sha256(f"{kind}:{tenant}:{name}".encode()).hexdigest()
    return f"{PREFIXES[kind]}-{digest}"


def read_request_id(request: Request, kind: str, tenant: str) -> tuple[str, bool]:
    """With whether the client has chosen it: the same then names the same request, of the same
    tenant. Nobody can name another tenant's. Raises InvalidRequest."""
    given = request.headers.get("idempotency-key") or request.headers.get("x-request-id")
    if given is None:
        return f"{PREFIXES[kind]}-{secrets.token_hex(16)}", False
    if _OWN_ID.fullmatch(given) is None:
        raise InvalidRequest(
            f"a request id is 1 to {MAX_ID_LEN} printable characters", field="X-Request-Id"
        )
    return named_request_id(kind, tenant, given), True


def part_ids(request_id: str, record: RequestRecord) -> list[str]:
    """The ids on the bus: of each prompt, where there are several."""
    parts = record.options.get("parts", 1)
    return [request_id] if parts == 1 else [f"{request_id}-{i}" for i in range(parts)]


def format_event_id(position: Sequence[int]) -> str:
    """From where the stream goes on: the number of the last event, of each log."""
    return ",".join(map(str, position))


def read_start(request: Request, parts: int) -> list[int]:
    """The first record that is to be shown, of each log. Raises InvalidRequest."""
    last, start = request.headers.get("last-event-id"), request.query_params.get("from")
    given, field = (start, "from") if last is None else (last, "Last-Event-ID")
    if not given:
        return [0] * parts
    try:
        numbers = [int(number) for number in given.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= parts if field == "from" else 1
    if len(numbers) != parts or min(numbers) < -1 or max(numbers) >= 2**53:
        raise InvalidRequest(f"{field} is not the id of an event of this stream", field=field)
    return [number + (last is not None) for number in numbers]


def wants_event_ids(request: Request, record: RequestRecord) -> bool:
    """Of events: who has no use for them may take an event with an id for broken, as clients do
    that expect nothing but OpenAI's `data:`, vLLM's load client for one."""
    return (
        record.durable
        or "text/event-stream" in request.headers.get("accept", "")
        or "last-event-id" in request.headers
        or "from" in request.query_params
    )
