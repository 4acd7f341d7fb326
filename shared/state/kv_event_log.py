"""KV events of engines: numbered payloads, published on `pm.kv.<engine>` and stored for a while.

A message is the payload's number, eight bytes in big-endian order, followed by the payload of
`workers/engine/core/kv_events.py`: the last two frames of vLLM's publisher in one. An engine counts
from 0. A reader that misses a number, or starts late, reads the stream. If events were already
removed from the stream, the reader can continue after the engine's next AllBlocksCleared.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

import structlog

from shared.bus.bus import Bus
from shared.errors import PagemillError, PayloadTooLarge
from shared.protocol import subjects

NUMBER_BYTES = 8

_log = structlog.get_logger()


class KVLogWriter:
    """Publishes payloads in order, in a separate task."""

    def __init__(self, bus: Bus, engine: str) -> None:
        self._bus = bus
        self._engine = engine
        self._next_number = 0
        # As many as the stream stores. During an outage of the broker, older ones are dropped.
        self._pending: deque[tuple[int, bytes]] = deque(maxlen=subjects.MAX_KV_BATCHES)
        self._changed = asyncio.Event()

    def put(self, payloads: Iterable[bytes]) -> None:
        """Queue payloads for publication."""
        for payload in payloads:
            self._pending.append((self._next_number, payload))
            self._next_number += 1
            self._changed.set()

    async def run(self) -> None:
        """Publish queued payloads until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._pending:
                await self._publish(*self._pending.popleft())

    async def _publish(self, number: int, payload: bytes) -> None:
        subject = subjects.kv(self._engine)
        message = number.to_bytes(NUMBER_BYTES, "big") + payload
        while True:
            try:
                await self._bus.publish(subject, message, f"kv-{self._engine}-{number}")
                return
            except PagemillError as error:
                _log.warning("kv_events_not_published", number=number, reason=error.message)
                if isinstance(error, PayloadTooLarge):
                    return
