"""JSON schemas without room for properties that they do not mention. Pure.

A schema that lists properties allows any others as well, unless `additionalProperties` is false. A
model that writes such an object may add keys until its token limit. So a constraint on an answer
allows the listed properties alone, which every reader of the schema accepts. A schema that says
`additionalProperties: true` keeps its meaning.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from shared.errors import InvalidRequest

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_INNER = _MAPS | {"items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf"}
_OWN = ("properties", "required", "minProperties")
"""Keywords that describe an object in the schema itself."""
_PARTS = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref")
"""Keywords that may describe further properties of the same object, as `allOf` does."""


def closed(
    schema: Mapping[str, Any], field: str = "", name: str = "", *, strict: bool = False
) -> dict[str, Any]:
    """Return the schema with its objects closed.

    An object stays open if it is described in several parts, such as `allOf`, because none of them
    lists all properties. With `strict`, objects without any properties are closed too, and one that
    would stay open raises InvalidRequest for `field`. Its message begins with `name`.
    """
    closer = _Closer(field, name or field, strict, _parts_of_objects(schema))
    result: dict[str, Any] = closer.close(schema, "")
    return result


def _parts_of_objects(root: Any) -> set[int]:
    """Return the `id` of each schema that describes only a part of an object."""
    found: set[int] = set()
    waiting: list[Any] = [schema for schema in _dicts_in(root) if _has_several_parts(schema)]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found.add(id(schema))
            for name in ("allOf", *_PARTS):
                inner = schema.get(name)
                if name == "$ref":
                    waiting.append(_target(root, inner))
                else:
                    waiting += inner if isinstance(inner, list) else [inner]
    return found


def _dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _dicts_in(inner)


def _has_several_parts(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("allOf")
    num_parts = len(parts) if isinstance(parts, list) else 0
    num_parts += any(name in schema for name in _OWN)
    return num_parts + sum(name in schema for name in _PARTS) > 1


def _target(root: Any, reference: Any) -> Any:
    """Return the schema that a reference within the document names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            root = root.get(key) if isinstance(root, dict) else None
    return root


class _Closer:
    def __init__(self, field: str, name: str, strict: bool, parts: set[int]) -> None:
        self._field = field
        self._name = name
        self._strict = strict
        self._parts = parts

    def close(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        closed = schema | self._close_inner(schema, path)
        if self._is_open(schema):
            if id(schema) not in self._parts and self._lists_required(schema):
                closed["additionalProperties"] = False
            elif self._strict:
                raise InvalidRequest(
                    f"{self._name}{path}: strict needs an object that one schema describes, with"
                    " all required properties: write its parts as one schema, or leave strict out",
                    field=self._field,
                )
        return closed

    def _close_inner(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        closed: dict[str, Any] = {}
        for name in schema.keys() & _INNER:
            inner, inner_path = schema[name], f"{path}.{name}"
            if name in _MAPS and isinstance(inner, dict):
                closed[name] = {
                    key: self.close(value, f"{inner_path}.{key}") for key, value in inner.items()
                }
            elif isinstance(inner, list):
                closed[name] = [
                    self.close(value, f"{inner_path}[{i}]") for i, value in enumerate(inner)
                ]
            else:
                closed[name] = self.close(inner, inner_path)
        return closed

    def _is_open(self, schema: Mapping[str, Any]) -> bool:
        """Return whether the schema is for objects, and says nothing of further properties."""
        if "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return False
        if isinstance(schema.get("properties"), dict):
            return True
        kinds = schema.get("type")
        is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
        has_parts = any(name in schema for name in ("allOf", *_PARTS))
        return self._strict and is_object and not has_parts

    def _lists_required(self, schema: Mapping[str, Any]) -> bool:
        required, properties = schema.get("required", ()), schema.get("properties", {})
        if not isinstance(required, list | tuple) or not isinstance(properties, dict):
            return False
        at_least = schema.get("minProperties", 0)
        has_enough = isinstance(at_least, int) and at_least <= len(properties)
        return has_enough and all(name in properties for name in required)
