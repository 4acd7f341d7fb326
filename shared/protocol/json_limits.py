"""Values of JSON that clients choose freely, such as schemas: how far they may go. Pure.

They travel in messages, whose readers recurse and whose numbers have 64 bits.
"""

from typing import Any

# With what surrounds it in a message to an engine, it is within the depth of that: see
# `codec.MAX_DEPTH`.
MAX_SCHEMA_DEPTH = 28
# A tool's becomes part of the schema of a call.
MAX_DEPTH = 22

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def complaint_of(value: Any, max_depth: int = MAX_DEPTH) -> str:
    """What is wrong with a value, for its author; empty if nothing is."""
    level = [value]
    for _ in range(max_depth + 1):
        if any(type(v) is int and not _MIN_INT <= v <= _MAX_INT for v in level):
            return "Expected integers of at most 64 bits"
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return ""
    return f"Expected at most {max_depth} levels of nesting"


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
