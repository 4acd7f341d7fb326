"""Fields of a message that an older reader must understand: all without a newer version."""

import json
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from shared.protocol import task_messages
from shared.protocol.requests import GenerateRequest
from shared.protocol.task_messages import TaskBody, TaskHeader

try:
    from shared.protocol.versions import mark_of
except ImportError:  # The code of version 2, which the record describes.

    def mark_of(_: Any) -> None:  # type: ignore[misc]
        return None


ROOTS: list[type[Struct]] = [
    GenerateRequest,
    TaskHeader,
    *(
        kind
        for kind in vars(task_messages).values()
        if isinstance(kind, type) and issubclass(kind, TaskBody)
    ),
]


def wire_fields(version: int) -> dict[str, dict[str, list[str]]]:
    """Return the fields that a reader of `version` has to know, with the values of literals."""
    fields_by_kind: dict[str, dict[str, list[str]]] = {}
    pending = list(ROOTS)
    while pending:
        kind = pending.pop()
        if kind.__name__ in fields_by_kind or getattr(kind, "since_version", 1) > version:
            continue
        fields = fields_by_kind[kind.__name__] = {}
        for field in msgspec.structs.fields(kind):
            mark = mark_of(field.type)
            since, values = mark or (1, ())
            if mark is None or values:
                literals = set(_literals(field.type)) - set(values)
                fields[field.encode_name] = sorted(map(str, literals))
            if since <= version or values:
                pending += _structs(field.type)
    return fields_by_kind


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        if get_origin(hint) is not Literal:
            yield from _parts(part)


def _structs(hint: Any) -> list[type[Struct]]:
    return [p for p in _parts(hint) if isinstance(p, type) and issubclass(p, Struct)]


def _literals(hint: Any) -> list[Any]:
    return [
        value for part in _parts(hint) if get_origin(part) is Literal for value in get_args(part)
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(wire_fields(2), indent=1, sort_keys=True) + "\n")
