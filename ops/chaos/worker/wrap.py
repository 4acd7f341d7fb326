"""The product's methods, watched from outside."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any


def wrap(owner: type, name: str) -> Callable[[Callable[..., Awaitable[Any]]], None]:
    """Have calls of `owner.name` go to the decorated function, which gets the original first."""
    original = getattr(owner, name)

    def put(wrapper: Callable[..., Awaitable[Any]]) -> None:
        @functools.wraps(original)
        async def call(*args: Any, **named: Any) -> Any:
            return await wrapper(original, *args, **named)

        setattr(owner, name, call)

    return put
