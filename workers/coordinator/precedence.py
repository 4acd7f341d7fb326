"""Precedence of urgent work over other work in one event loop."""

import asyncio
import contextlib
from collections.abc import Iterator

# Urgent work takes milliseconds. Other work must proceed even if there is always some.
MAX_WAIT_S = 0.1


class Precedence:
    """Counts the urgent work in progress, so that other work can wait for its end."""

    def __init__(self) -> None:
        self._num_urgent = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    @contextlib.contextmanager
    def urgent(self) -> Iterator[None]:
        """Make other work wait during the body."""
        self._num_urgent += 1
        self._is_free.clear()
        try:
            yield
        finally:
            self._num_urgent -= 1
            if not self._num_urgent:
                self._is_free.set()

    async def wait(self) -> None:
        """Return when no urgent work is in progress, and at the latest after MAX_WAIT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_WAIT_S):
                await self._is_free.wait()
