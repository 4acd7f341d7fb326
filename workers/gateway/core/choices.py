"""Values of which only some are available. Pure."""

from collections.abc import Iterable

from shared.errors import InvalidRequest


def check_choice(field: str, value: str, available: Iterable[str]) -> None:
    """Raise InvalidRequest for a value that is not available, with those that are."""
    if value not in available:
        there_are = ", ".join(available) or "none"
        raise InvalidRequest(
            f"{field}: {value!r} is not available; available: {there_are}", field=field
        )
