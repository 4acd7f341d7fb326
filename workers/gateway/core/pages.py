"""Pages of lists, with the query parameters `after`, `limit` and `order` of OpenAI's API. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from shared.errors import InvalidRequest, NotFound

T = TypeVar("T")


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Return the size of the page that a query asks for, up to `most`. Raises InvalidRequest."""
    text = query.get("limit", str(default))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit must be a number from 1 to {most}", field="limit")
    return int(text)


class Page(NamedTuple, Generic[T]):
    items: list[T]
    has_more: bool


def page_of(
    items: Sequence[T], id_of: Callable[[T], str], query: Mapping[str, str], most: int
) -> Page[T]:
    """Return the page of `items` that a query names. `items` are sorted, the newest first.

    A page has by default `most` items. Raises InvalidRequest, and NotFound for an id that is not in
    the list.
    """
    num_items = limit_of(query, most, most)
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
    end = start + num_items
    return Page(sorted_items[start:end], end < len(sorted_items))
