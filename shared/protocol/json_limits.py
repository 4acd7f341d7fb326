"""Limits on JSON values that clients choose freely, such as schemas. Pure.

The limits hold because the values are part of messages with recursive decoders and 64-bit integers.
"""

import sys
from typing import Any

# A schema and the levels of the message around it stay within `shared.codec.envelope.MAX_DEPTH`.
MAX_SCHEMA_DEPTH = 28
# The schema of a tool becomes part of the schema of a call.
MAX_DEPTH = 22

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def json_limit_error(value: Any, max_depth: int = MAX_DEPTH, max_values: int = sys.maxsize) -> str:
    """Return a message about the exceeded limit, or "" if the value is within all limits.

    `max_values` is the limit on the values in each level.
    """
    level = [value]
    for _ in range(max_depth + 1):
        if len(level) > max_values:
            return f"must have at most {max_values} values in a level of nesting"
        if any(type(v) is int and not _MIN_INT <= v <= _MAX_INT for v in level):
            return "must have integers of at most 64 bits"
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return ""
    return f"must have at most {max_depth} levels of nesting"


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
