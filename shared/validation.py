"""Helpers for msgspec's validation errors."""

import msgspec

from shared.errors import InvalidRequest


def split_validation_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split "reason - at `$.a.b`" into ("reason", "a.b").

    The path of an error in a mapping's key is the path of the mapping.
    """
    reason, _, path = str(error).partition(" - at `")
    path = path.removeprefix("key` in `")
    return reason, path.removesuffix("`").removeprefix("$").removeprefix(".")


def invalid_request(error: msgspec.ValidationError, prefix: str = "") -> InvalidRequest:
    """Return the error of a request, which names the wrong field; `prefix` is the path to it."""
    reason, path = split_validation_error(error)
    field = f"{prefix}{path}"
    return InvalidRequest(f"{field or 'request'}: {reason}", field=field or None)
