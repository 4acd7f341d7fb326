"""Turns of tenants at costly work, with a limit on simultaneous work. For one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from shared.errors import Overloaded
from shared.tenants.fair_queue import FairQueue


class FairTurns:
    """Limit on callers that work at the same time, with a fair queue of waiting callers."""

    def __init__(self, max_running: int, complaint: str) -> None:
        self._num_free = max_running
        self._complaint = complaint
        """End of the error message, which begins with the limit on callers."""
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, max_held: int) -> AsyncIterator[None]:
        """Wait for a turn, and have it during the body. At most `max_held` callers wait or run.

        Raises Overloaded at once, or when a caller of another tenant gets the place.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rejected = self._queue.add(tenant, turn, max_held)
        if rejected is not None:
            rejected.set_exception(Overloaded(f"{max_held} {self._complaint}"))
        self._start_waiting()
        try:
            await asyncio.shield(turn)
            yield
        finally:
            if not turn.done():
                self._queue.withdraw(tenant, turn)
            elif turn.exception() is None:
                self._num_free += 1
                self._queue.finish(tenant)
                self._start_waiting()

    def is_wanted(self, tenant: str) -> bool:
        """Return whether a caller of another tenant waits for a turn."""
        return self._queue.has_waiting_besides(tenant)

    def _start_waiting(self) -> None:
        while self._num_free and (waiter := self._queue.start_next()) is not None:
            self._num_free -= 1
            waiter.set_result(None)
