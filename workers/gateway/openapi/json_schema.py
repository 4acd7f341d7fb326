"""JSON schemas of the types that the API reads and writes, by msgspec; and where it makes none,
which is for unions of Structs that nothing but their fields tells apart, of their parts. Pure."""

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct, UnsetType

_REF = "#/components/schemas/{name}"


class Schemas:
    def __init__(self, types: Iterable[Any]) -> None:
        able: dict[str, Any] = {}
        for one in types:
            _collect(one, able)
        found, components = msgspec.json.schema_components(able.values(), ref_template=_REF)
        self._found: dict[str, dict[str, Any]] = dict(zip(able, found, strict=True))
        self.components: dict[str, Any] = components

    def of(self, one: Any) -> dict[str, Any]:
        """The schema of one of the types that were given, or of a part of it."""
        if (known := self._found.get(repr(one))) is not None:
            return known
        if _is_struct(one):
            self.components[one.__name__] = self._of_struct(one)
            made: dict[str, Any] = {"$ref": _REF.format(name=one.__name__)}
        elif get_origin(one) is list:
            made = {"type": "array", "items": self.of(get_args(one)[0])}
        else:
            made = {"anyOf": [self.of(kind) for kind in get_args(one) if kind is not UnsetType]}
        self._found[repr(one)] = made
        return made

    def _of_struct(self, cls: type[Struct]) -> dict[str, Any]:
        hints = get_type_hints(cls, include_extras=True)
        fields = msgspec.structs.fields(cls)
        needed = [f.name for f in fields if f.default is f.default_factory is NODEFAULT]
        properties = {field.encode_name: self.of(hints[field.name]) for field in fields}
        return {"title": cls.__name__, "type": "object", "properties": properties} | (
            {"required": needed} if needed else {}
        )


def _collect(one: Any, able: dict[str, Any]) -> None:
    """The types that msgspec has schemas of, of which `one` is made."""
    try:
        msgspec.json.schema_components([one], ref_template=_REF)
    except TypeError:
        for part in _parts(one):
            _collect(part, able)
    else:
        able[repr(one)] = one


def _parts(one: Any) -> list[Any]:
    if _is_struct(one):
        return list(get_type_hints(one, include_extras=True).values())
    assert get_origin(one) in (list, Union, UnionType), one
    return [NoneType if part is None else part for part in get_args(one) if part is not UnsetType]


def _is_struct(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, Struct)
