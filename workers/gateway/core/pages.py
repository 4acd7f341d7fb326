"""Pages of lists, with the query parameters `after`, `limit` and `order` of OpenAI's API. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from shared.errors import InvalidRequest, NotFound

T = TypeVar("T")


class Page(NamedTuple, Generic[T]):
    items: list[T]
    has_more: bool


def page_of(
    items: Sequence[T],
    id_of: Callable[[T], str],
    query: Mapping[str, str],
    *,
    limit: int,
    most: int,
) -> Page[T]:
    """Return the page of `items` that a query names. `items` are sorted, the newest first.

    `limit` is the default size of a page, and `most` the largest one. Raises InvalidRequest, and
    NotFound for an id that is not in the list.
    """
    text = query.get("limit", str(limit))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit must be a number from 1 to {most}", field="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    sorted_items = list(items if order == "desc" else reversed(items))
    start = 0
    if (after := query.get("after")) is not None:
        ids = [id_of(item) for item in sorted_items]
        if after not in ids:
            raise NotFound(f"the list has no {after!r}", field="after")
        start = ids.index(after) + 1
    end = start + int(text)
    return Page(sorted_items[start:end], end < len(sorted_items))
