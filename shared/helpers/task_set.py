"""Background tasks that no caller awaits."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskSet(set[asyncio.Task[None]]):
    """Set of running tasks. It keeps them alive: the event loop itself has only weak references."""

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
