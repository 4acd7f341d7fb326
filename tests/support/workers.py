"""Announcement of a worker that serves in this process."""

import asyncio
from collections.abc import Callable

from shared.stage.runtime import Context


class Announcement:
    """The call of `Context.ready` by a worker."""

    def __init__(self, context: Context) -> None:
        self._is_ready = asyncio.Event()
        self.load: Callable[[], dict[str, float]]
        """The figures of the worker's heartbeats, once it is ready."""
        announce = context.ready

        def ready(models: list[str], load: Callable[[], dict[str, float]]) -> None:
            announce(models, load)
            self.load = load
            self._is_ready.set()

        context.ready = ready  # type: ignore[method-assign]

    async def wait(self) -> None:
        await self._is_ready.wait()
