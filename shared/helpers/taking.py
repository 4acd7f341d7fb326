"""Reading of a limited number of items from an asynchronous iterator."""

from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def take(items: AsyncIterator[T], limit: int | None) -> list[T]:
    """Return the next items, at most `limit`. Further calls return the items after them."""
    batch: list[T] = []
    async for item in items:
        batch.append(item)
        if len(batch) == limit:
            break
    return batch
