"""JSON schemas of the types that the API reads and writes. Pure.

msgspec makes them, but not for unions of untagged Structs. The schema of a type that contains such
a union is put together from the schemas of its parts.
"""

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct, UnsetType

_REF = "#/components/schemas/{name}"


class Schemas:
    def __init__(self, types: Iterable[Any]) -> None:
        supported: dict[str, Any] = {}
        for one in types:
            _collect(one, supported)
        found, components = msgspec.json.schema_components(supported.values(), ref_template=_REF)
        self._found: dict[str, dict[str, Any]] = dict(zip(supported, found, strict=True))
        self.components: dict[str, Any] = components

    def of(self, one: Any) -> dict[str, Any]:
        """Return the schema of one of the given types, or of a part of one."""
        if (found := self._found.get(repr(one))) is not None:
            return found
        if _is_struct(one):
            self.components[one.__name__] = self._of_struct(one)
            schema: dict[str, Any] = {"$ref": _REF.format(name=one.__name__)}
        elif get_origin(one) is list:
            schema = {"type": "array", "items": self.of(get_args(one)[0])}
        else:
            schema = {"anyOf": [self.of(kind) for kind in get_args(one) if kind is not UnsetType]}
        self._found[repr(one)] = schema
        return schema

    def _of_struct(self, cls: type[Struct]) -> dict[str, Any]:
        hints = get_type_hints(cls, include_extras=True)
        fields = msgspec.structs.fields(cls)
        required = [f.name for f in fields if f.default is f.default_factory is NODEFAULT]
        properties = {field.encode_name: self.of(hints[field.name]) for field in fields}
        return {"title": cls.__name__, "type": "object", "properties": properties} | (
            {"required": required} if required else {}
        )


def _collect(one: Any, supported: dict[str, Any]) -> None:
    """Add the types that `one` consists of, and that msgspec has schemas for."""
    try:
        msgspec.json.schema_components([one], ref_template=_REF)
    except TypeError:
        for part in _parts(one):
            _collect(part, supported)
    else:
        supported[repr(one)] = one


def _parts(one: Any) -> list[Any]:
    if _is_struct(one):
        return list(get_type_hints(one, include_extras=True).values())
    assert get_origin(one) in (list, Union, UnionType), one
    return [NoneType if part is None else part for part in get_args(one) if part is not UnsetType]


def _is_struct(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, Struct)
