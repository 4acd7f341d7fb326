"""Types of request bodies, as msgspec describes them: unknown fields and allowed values. Pure."""

import re
from collections.abc import Iterable, Iterator, Set
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


def without_unknown(value: Any, body_type: Any, extra: Set[str] = frozenset()) -> Any:
    """Return a decoded body without the fields that its type does not have.

    Fields of the body itself that are in `extra` stay.
    """
    return _pruned(value, inspect.type_info(body_type), extra)


def _pruned(value: Any, kind: inspect.Type, extra: Set[str] = frozenset()) -> Any:
    if isinstance(value, list):
        items = next((k.item_type for k in _kinds(kind) if isinstance(k, inspect.ListType)), None)
        return value if items is None else [_pruned(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    structs = [k for k in _kinds(kind) if isinstance(k, inspect.StructType)]
    fits = [k for k in structs if k.tag_field is None or value.get(k.tag_field) == k.tag]
    if not fits:
        return value
    types = {field.encode_name: field.type for field in fits[0].fields}
    return {
        name: _pruned(inner, types[name]) if name in types else inner
        for name, inner in value.items()
        if name in types or name == fits[0].tag_field or name in extra
    }


def _kinds(kind: inspect.Type) -> Iterable[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def fields_at(body_type: Any, path: str) -> list[str]:
    """Return the names of the fields that an object at this path may have."""
    structs = (k for k in _kinds_at(body_type, path) if isinstance(k, inspect.StructType))
    return [field.encode_name for struct in structs for field in struct.fields]


def values_at(body_type: Any, path: str) -> list[str]:
    """Return the values that a text at this path may have; empty if they are not listed."""
    literals = (k for k in _kinds_at(body_type, path) if isinstance(k, inspect.LiteralType))
    return [str(value) for literal in literals for value in literal.values]


def _kinds_at(body_type: Any, path: str) -> Iterator[inspect.Type]:
    kinds: list[inspect.Type] = [inspect.type_info(body_type)]
    for step in _STEP.findall(path):
        kinds = [inner for kind in kinds for each in _kinds(kind) for inner in _after(each, step)]
    for kind in kinds:
        yield from _kinds(kind)


def _after(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    match kind:
        case inspect.ListType():
            yield kind.item_type
        case inspect.DictType():
            yield kind.value_type
        case inspect.StructType():
            yield from (field.type for field in kind.fields if field.encode_name == step)
            if kind.tag_field == step:
                yield inspect.LiteralType((kind.tag,))
