"""Pages of lists, with the query parameter `limit` of OpenAI's API. Pure."""

from collections.abc import Mapping

from shared.errors import InvalidRequest


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Return the size of the page that a query asks for, up to `most`. Raises InvalidRequest."""
    text = query.get("limit", str(default))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit must be a number from 1 to {most}", field="limit")
    return int(text)
