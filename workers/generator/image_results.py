"""Result cache of painted images: equal requests with a seed are painted once in the cluster.

The key is a hash of everything that affects the pixels, and of the tenant's cache scope. The first
request writes a claim under the key, with a fence. Equal requests that arrive in the meantime wait
for its result. A claim is valid until its request has ended, even if another worker continues the
request. Results refer to files, which are stored like the images of any request.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from typing import NamedTuple

from shared.bus.bus import Bus
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.encoding import to_msgpack
from shared.protocol.images import PaintParams
from shared.protocol.messages import CachedImages, decode_cached_images
from shared.protocol.task_messages import TaskHeader
from shared.state.log_records import is_final
from shared.state.token_log import last_record

LOOK_S = 1.0
"""Interval at which a waiting request checks whether the request with the claim has ended."""
FENCED_PAUSE_S = 0.05


def key_of(model: str, header: TaskHeader, prompt: str) -> str | None:
    """Return the key of a request's images; None for a request without a seed, or with previews.

    `model` identifies the weights, the stage and the dtype. Only requests of one lane share
    results, so that an interactive request never waits for a batch request.
    """
    params, ticket = header.image, header.ticket
    if params is None or ticket is None or params.seed is None or params.partial_images:
        return None
    parts: tuple[str, PaintParams, str, str, str]
    parts = model, params, prompt, ticket.cache_scope, header.lane
    return f"image_{hashlib.sha256(to_msgpack(parts)).hexdigest()}"


class ImageClaim(NamedTuple):
    """Right to publish the images of a key."""

    key: str
    request_id: str
    sequence: int
    """Sequence of the claim's message. A claim that has been replaced has no effect."""


class ImageResults:
    """Results that all generators of a cluster share."""

    def __init__(self, bus: Bus, ttl_s: float) -> None:
        self._bus = bus
        self._ttl_s = ttl_s

    async def find_or_claim(
        self, key: str, request_id: str, check: Callable[[], None]
    ) -> list[str] | ImageClaim:
        """Return the images of a key, or a claim if the caller has to paint them.

        `check` is called repeatedly while another request paints them, and may raise to end the
        wait.
        """
        subject = subjects.result(key)
        listener = await self._bus.subscribe(subject)
        try:
            while True:
                last = await self._bus.read_last(subjects.RESULTS_STREAM, subject)
                cached = None if last is None else decode_cached_images(last.data)
                if last is not None and cached is not None and cached.images:
                    if self._bus.now_ms() - last.stored_ms < 1000 * self._ttl_s:
                        return cached.images
                elif cached is not None and not await self._may_replace(cached, request_id):
                    if await listener.next(LOOK_S) is None:
                        check()
                    continue
                claim = await self._claim(key, request_id, 0 if last is None else last.sequence)
                if claim is not None:
                    return claim
        finally:
            await self._bus.unsubscribe(listener)

    async def publish(self, claim: ImageClaim, images: list[str]) -> None:
        """Publish the images that were claimed, unless the claim has been replaced."""
        data = to_msgpack(CachedImages(claim.request_id, images))
        # Fenced if an equal request claimed the key after the end of this request.
        with contextlib.suppress(Fenced):
            await self._bus.append(subjects.result(claim.key), data, claim.sequence)

    async def reclaim(self, key: str, request_id: str) -> ImageClaim | None:
        """Claim a key with images that are no longer stored; None if another request has."""
        last = await self._bus.read_last(subjects.RESULTS_STREAM, subjects.result(key))
        return await self._claim(key, request_id, 0 if last is None else last.sequence)

    async def _may_replace(self, claim: CachedImages, request_id: str) -> bool:
        if claim.owner == request_id:
            return True
        return is_final(await last_record(self._bus, claim.owner))

    async def _claim(self, key: str, request_id: str, last_sequence: int) -> ImageClaim | None:
        data = to_msgpack(CachedImages(request_id, []))
        try:
            sequence = await self._bus.append(subjects.result(key), data, last_sequence)
        except Fenced:
            # The replica that answers reads may not have the latest message yet.
            await asyncio.sleep(FENCED_PAUSE_S)
            return None
        return ImageClaim(key, request_id, sequence)
