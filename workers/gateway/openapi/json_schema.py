"""JSON schemas of the types that the API reads and writes. Pure.

msgspec has no schemas for unions of untagged Structs. The schema of a type that contains such a
union is composed of the schemas of its parts.
"""

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct, UnsetType

JsonSchema = dict[str, object]
_REF = "#/components/schemas/{name}"


class Schemas:
    """Schemas of types. `components` has the schemas of Structs, and other schemas refer to it."""

    def __init__(self, types: Iterable[Any]) -> None:
        supported: dict[str, object] = {}
        for type_ in types:
            _collect(type_, supported)
        schemas, components = msgspec.json.schema_components(supported.values(), ref_template=_REF)
        self._schemas: dict[str, JsonSchema] = dict(zip(supported, schemas, strict=True))
        """Schemas by the `repr` of their types."""
        self.components: dict[str, JsonSchema] = components

    def of(self, type_: Any) -> JsonSchema:
        """Return the schema of a type of the constructor, or of a part of such a type."""
        if (schema := self._schemas.get(repr(type_))) is not None:
            return schema
        if _is_struct(type_):
            self.components[type_.__name__] = self._of_struct(type_)
            schema = {"$ref": _REF.format(name=type_.__name__)}
        elif get_origin(type_) is list:
            schema = {"type": "array", "items": self.of(get_args(type_)[0])}
        else:
            schema = {"anyOf": [self.of(part) for part in get_args(type_) if part is not UnsetType]}
        self._schemas[repr(type_)] = schema
        return schema

    def _of_struct(self, cls: type[Struct]) -> JsonSchema:
        hints = get_type_hints(cls, include_extras=True)
        fields = msgspec.structs.fields(cls)
        required = [f.name for f in fields if f.default is f.default_factory is NODEFAULT]
        properties = {field.encode_name: self.of(hints[field.name]) for field in fields}
        schema: JsonSchema = {"title": cls.__name__, "type": "object", "properties": properties}
        return schema | {"required": required} if required else schema


def _collect(type_: Any, supported: dict[str, object]) -> None:
    """Add the largest parts of a type for which msgspec has schemas, by their `repr`."""
    try:
        msgspec.json.schema_components([type_], ref_template=_REF)
    except TypeError:
        for part in _parts(type_):
            _collect(part, supported)
    else:
        supported[repr(type_)] = type_


def _parts(type_: Any) -> list[Any]:
    if _is_struct(type_):
        return list(get_type_hints(type_, include_extras=True).values())
    assert get_origin(type_) in (list, Union, UnionType), type_
    return [NoneType if part is None else part for part in get_args(type_) if part is not UnsetType]


def _is_struct(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, Struct)
