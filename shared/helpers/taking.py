"""Reading of a limited number of items from an asynchronous iterator."""

from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def take(items: AsyncIterator[T], limit: int | None) -> list[T]:
    """Return the next items, at most `limit`. Further calls return the items after them."""
    taken: list[T] = []
    async for item in items:
        taken.append(item)
        if len(taken) == limit:
            break
    return taken
