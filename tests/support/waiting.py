"""Waits for a state, for tests in which another task, thread or process changes it."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PAUSE_S = 0.01


async def until(
    condition: Callable[[], Any],
    within_s: float = 120.0,
    message: str = "the condition did not come true",
) -> Any:
    """Wait until a condition, which may be a coroutine function, is true, and return its value."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, message
        await asyncio.sleep(PAUSE_S)


def wait_until(
    condition: Callable[[], Any],
    within_s: float = 120.0,
    message: str = "the condition did not come true",
) -> Any:
    """Block this thread until a condition is true, and return its value."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(PAUSE_S)
    return value
