"""Helper for msgspec's validation errors."""

import msgspec


def split_validation_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split "reason - at `$.a.b`" into ("reason", "a.b").

    The path of an error in a mapping's key is the path of the mapping.
    """
    reason, _, path = str(error).partition(" - at `")
    path = path.removeprefix("key` in `")
    return reason, path.removesuffix("`").removeprefix("$").removeprefix(".")
