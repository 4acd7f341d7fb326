"""Reading a request's body: how much, how long, and what is JSON."""

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from shared.config import GatewayConfig
from shared.errors import InvalidRequest
from workers.gateway.errors import BodyTooLarge, TooSlow, WrongContentType, refused

T = TypeVar("T")

# Decoding more would keep everybody else waiting.
THREAD_BYTES = 256 * 2**10


async def read(request: Request, limits: GatewayConfig) -> bytes:
    """Raises BodyTooLarge as soon as it is known to be, TooSlow, or ClientDisconnect."""
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
                parts.append(part)
    except TimeoutError:
        raise TooSlow(f"the body did not arrive within {limits.body_timeout_s:g} s") from None
    return b"".join(parts)


async def decode(
    request: Request,
    limits: GatewayConfig,
    decoder: "msgspec.json.Decoder[T]",
    unsupported: frozenset[str] = frozenset(),
) -> T:
    """The body as `decoder` has it. Raises a RequestError that names what is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongContentType("the body must be JSON: send `Content-Type: application/json`")
    body = await read(request, limits)
    try:
        if len(body) > THREAD_BYTES:
            return await asyncio.to_thread(decoder.decode, body)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise refused(error, unsupported) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, msgspec.DecodeError):
        return str(error)
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it is not UTF-8"
