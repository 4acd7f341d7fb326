"""Reading a request's body: how much, how long, and what is JSON."""

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from shared.config import GatewayConfig
from shared.errors import InvalidRequest, Overloaded
from workers.gateway.http.errors import (
    BodyTooLarge,
    RequestTimeout,
    WrongContentType,
    validation_error,
)

T = TypeVar("T")

# A decoder lets nobody else go on until it is through, and 60 MiB of empty lists were seen to take
# 5 s and more than a gigabyte. Pictures are one value each, and token ids one each.
MAX_VALUES = 2**20
# As many bodies of the largest size may be on their way at one time, or more smaller ones.
MAX_LARGEST = 16


class BodyBudget:
    """Memory for bodies that have not been handed on yet, those of everybody together."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._free = MAX_LARGEST * limits.max_body_mib * 2**20

    def reserve(self, request: Request, num_bytes: int) -> None:
        """Until `release`. Raises Overloaded."""
        if num_bytes > self._free:
            raise Overloaded("too many large bodies are on their way")
        self._free -= num_bytes
        request.scope["body_bytes"] = request.scope.get("body_bytes", 0) + num_bytes

    def release(self, request: Request) -> None:
        """What this request has taken, if it still has it."""
        self._free += request.scope.pop("body_bytes", 0)


async def read(request: Request, limits: GatewayConfig, budget: BodyBudget) -> bytes:
    """Return the request's body.

    Raises BodyTooLarge as soon as the limit is passed, Overloaded, RequestTimeout, WrongContentType
    for a compressed body, or ClientDisconnect.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongContentType("a body must not be compressed: leave Content-Encoding out")
    limit = limits.max_body_mib * 2**20
    too_large = BodyTooLarge(f"a body may have {limits.max_body_mib} MiB")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise too_large
    parts, total = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                total += len(part)
                if total > limit:
                    raise too_large
                budget.reserve(request, len(part))
                parts.append(part)
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not arrive within {limits.body_timeout_s:g} s"
        ) from None
    body = b"".join(parts)
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BodyTooLarge(f"a body may have {MAX_VALUES} values")
    return body


async def decode(
    request: Request,
    limits: GatewayConfig,
    budget: BodyBudget,
    decoder: "msgspec.json.Decoder[T]",
    unsupported: frozenset[str] = frozenset(),
) -> T:
    """The body as `decoder` has it. Raises a RequestError that names what is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongContentType("the body must be JSON: send `Content-Type: application/json`")
    body = await read(request, limits, budget)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(error, unsupported) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, msgspec.DecodeError):
        return str(error)
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it is not UTF-8"
