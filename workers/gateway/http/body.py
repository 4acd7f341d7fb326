"""Request bodies: limits on size and time, and decoding of JSON."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from starlette.requests import Request

from shared.config.schema import ApiKey, GatewayConfig
from shared.errors import Overloaded
from shared.protocol.value_limits import count_bytes
from shared.tenants.fair_turns import FairTurns
from shared.tenants.tenant_shares import TenantShares
from workers.gateway.http.auth import has_several_tenants
from workers.gateway.http.body_types import decoded
from workers.gateway.http.errors import BodyTooLarge, RequestTimeout, WrongContentType

T = TypeVar("T")

# A decoder blocks the event loop until it is done. For 60 MiB of empty lists it took 5 s and more
# than a gigabyte. An image counts as one value, and so does each token id.
MAX_VALUES = 2**20
# Number of bodies of the largest size that fit into the reserved memory at one time.
MAX_LARGEST = 16
MAX_WAITING = 16
"""Limit on bodies that wait for the thread of `in_turn`."""


class BodyReader:
    """Reads bodies, within limits on each and on the memory of all that are not published yet."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._limits = limits
        self.ignores_unknown = limits.unknown_fields == "ignore"
        """Whether unknown fields of bodies have no effect."""
        self._memory = TenantShares(0, has_tenants=False)
        self._unfinished = TenantShares(0, has_tenants=False)
        self.set_keys(limits.api_keys)
        self._thread = FairTurns(1, "bodies wait to be decoded")

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """Divide memory and connections for the tenants of the configured keys."""
        has_tenants = has_several_tenants(keys)
        num_bytes = MAX_LARGEST * self._limits.max_body_mib * 2**20
        self._memory.change(num_bytes, has_tenants=has_tenants)
        # At most half of the connections may send bodies at one time. The others stay free for
        # requests without a body, and for answers.
        self._unfinished.change(self._limits.max_connections // 2, has_tenants=has_tenants)

    async def read(self, request: Request) -> bytes:
        """Return the request's body. Its memory is reserved until `release`.

        Raises BodyTooLarge as soon as the limit is passed, Overloaded, RequestTimeout,
        WrongContentType for a compressed body, or ClientDisconnect.
        """
        check_not_compressed(request)
        limit, timeout_s = self._limits.max_body_mib * 2**20, self._limits.body_timeout_s
        too_large = BodyTooLarge(f"a body may have at most {self._limits.max_body_mib} MiB")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise too_large
        parts, total, tenant = [], 0, tenant_of(request)
        if not self._unfinished.take(tenant, 1):
            raise Overloaded("too many request bodies are being received")
        try:
            async with asyncio.timeout(timeout_s):
                async for part in request.stream():
                    total += len(part)
                    if total > limit:
                        raise too_large
                    self.reserve(request, len(part))
                    parts.append(part)
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None
        finally:
            self._unfinished.give_back(tenant, 1)
        return b"".join(parts)

    async def decode(
        self,
        request: Request,
        body_type: type[T],
        unsupported: frozenset[str] = frozenset(),
        root: str = "",
    ) -> T:
        """Return the body as this type. Raises a RequestError that names the wrong field.

        The parameters are as in `body_types.decoded`.
        """
        if not declares_json(request):
            raise WrongContentType("the body must be JSON: send `Content-Type: application/json`")
        body = await self.read(request)
        check_num_values(body)
        ignores_unknown = self.ignores_unknown
        return decoded(body, body_type, unsupported, root=root, ignores_unknown=ignores_unknown)

    async def in_turn(self, request: Request, work: Callable[[], T]) -> T:
        """Run work that takes seconds in a thread. Tenants take turns. Raises Overloaded."""
        async with self._thread.turn(tenant_of(request), MAX_WAITING):
            return await asyncio.to_thread(work)

    def release(self, request: Request) -> None:
        """Free everything that this request has reserved. A second call has no effect."""
        self._memory.give_back(tenant_of(request), request.scope.pop("body_bytes", 0))

    def reserve(self, request: Request, num_bytes: int) -> None:
        """Reserve memory until `release`. Raises Overloaded."""
        if not self._memory.take(tenant_of(request), num_bytes):
            raise Overloaded("too many large request bodies are being received")
        request.scope["body_bytes"] = request.scope.get("body_bytes", 0) + num_bytes


def tenant_of(request: Request) -> str:
    """Return the tenant of the key that the request was sent with."""
    tenant: str = request.scope.get("tenant", "")
    return tenant


def check_not_compressed(request: Request) -> None:
    """Raises WrongContentType."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongContentType("the body must not be compressed: leave Content-Encoding out")


def check_form(request: Request) -> str:
    """Return the content type of a form. Raises WrongContentType for any other body."""
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise WrongContentType("the body must be a form: send `multipart/form-data`")
    check_not_compressed(request)
    return content_type


def check_num_values(body: bytes) -> None:
    """Raise BodyTooLarge for JSON that would take too long to decode."""
    if sum(count_bytes(body, b",[{")) > MAX_VALUES:
        raise BodyTooLarge(f"a body may have at most {MAX_VALUES} values")


def declares_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json"
