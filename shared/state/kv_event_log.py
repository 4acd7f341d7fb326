"""KV events of engines: numbered payloads, live on `pm.kv.<engine>` and kept for a while.

A message is the payload's number, eight bytes with the highest first, and then the payload as
`workers/engine/core/kv_events.py` writes it: the last two frames of vLLM's publisher in one. An
engine counts from 0. A reader that misses a number, or comes late, reads the stream; what has been
removed from it leaves a gap, and the engine's blocks are known again from its next AllBlocksCleared
on.
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
    """Publishes one after another, apart from whoever puts them in."""

    def __init__(self, bus: Bus, engine: str) -> None:
        self._bus = bus
        self._engine = engine
        self._next_number = 0
        # What a broker that is away for long would not keep either.
        self._pending: deque[tuple[int, bytes]] = deque(maxlen=subjects.MAX_KV_BATCHES)
        self._changed = asyncio.Event()

    def put(self, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            self._pending.append((self._next_number, payload))
            self._next_number += 1
            self._changed.set()

    async def run(self) -> None:
        """For ever."""
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
                _log.warning("kv_events_wait", number=number, reason=error.message)
                if isinstance(error, PayloadTooLarge):
                    return


def split_message(message: bytes) -> tuple[int, bytes]:
    """Number and payload."""
    return int.from_bytes(message[:NUMBER_BYTES], "big"), message[NUMBER_BYTES:]


async def replay(bus: Bus, engine: str, first: int = 0) -> list[tuple[int, bytes]]:
    """What is kept of an engine's payloads from number `first` on, each with its number.

    Raises Unavailable when the broker does not answer.
    """
    stored = await bus.read(subjects.KV_STREAM, subjects.kv(engine))
    return [(n, payload) for n, payload in (split_message(s.data) for s in stored) if n >= first]
