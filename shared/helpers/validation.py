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


def invalid_request(error: Exception, prefix: str = "") -> InvalidRequest:
    """Return the error for a request that cannot be decoded, with the path of the wrong field.

    The path begins with `prefix`.
    """
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest(f"the request is neither JSON nor msgpack: {error}")
    reason, path = split_validation_error(error)
    field = f"{prefix}{path}"
    return InvalidRequest(f"{field or 'request'}: {reason}", field=field or None)
