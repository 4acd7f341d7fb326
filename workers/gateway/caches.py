"""Caches of what workers tell: the bytes of tokens, heartbeats and reports of their start."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, TypeVar

from shared import client
from shared.bus.bus import Bus
from shared.protocol.messages import Heartbeat, StartReport
from shared.protocol.renderer_rpc import DetokenizeRequest
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.http.errors import unwrap_reply

Sign = TypeVar("Sign", Heartbeat, StartReport)

READ_TIMEOUT_S = 2.0
FRESH_S = 0.5


class SignsCache(Generic[Sign]):
    """What all workers last told, so that frequent probes do not each ask the broker."""

    def __init__(self, read: Callable[[], Awaitable[list[Sign]]]) -> None:
        self._ask: Callable[[], Awaitable[list[Sign]]] = read
        self._signs: list[Sign] = []
        self._read_s = float("-inf")

    async def read(self) -> list[Sign]:
        """Raises Unavailable or TimeoutError."""
        if time.monotonic() - self._read_s > FRESH_S:
            async with asyncio.timeout(READ_TIMEOUT_S):
                self._signs = await self._ask()
            self._read_s = time.monotonic()
        return self._signs


class TokenBytesCache:
    """Bytes of tokens, filled by asking renderers.

    It has no limit: a model has only so many tokens.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._by_model: dict[str, dict[int, bytes]] = {}

    def of(self, model: str) -> TokenBytes:
        """Return the bytes of a model's tokens. Tokens appear in it as `load` adds them."""
        return self._by_model.setdefault(model, {})

    async def load(self, model: str, token_ids: Collection[int], tenant: str) -> None:
        """Make sure that the cache has the bytes of these tokens.

        Missing ones are requested in the turn of `tenant`. Raises Unavailable.
        """
        cached = self._by_model.setdefault(model, {})
        missing = [token_id for token_id in token_ids if token_id not in cached]
        if not missing:
            return
        request = DetokenizeRequest(missing)
        reply = unwrap_reply(await client.detokenize(self._bus, model, request, tenant=tenant))
        cached.update(zip(missing, reply.token_bytes, strict=True))
