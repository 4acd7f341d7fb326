"""JSON schemas without room for properties that they do not mention. Pure.

A schema that lists properties allows any others as well, unless `additionalProperties` is false. A
model that writes such an object may add keys until its token limit. So a constraint on an answer
allows the listed properties alone, which every reader of the schema accepts. A schema that says
`additionalProperties: true` keeps its meaning.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shared.errors import InvalidRequest

_MAPS = frozenset({"properties", "$defs", "definitions"})
_INNER = _MAPS | {"items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf"}
_PARTS = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref")
"""Keywords that may describe further properties of the same object."""


def closed(
    schema: Mapping[str, Any], field: str = "", name: str = "", *, strict: bool = False
) -> dict[str, Any]:
    """Return the schema with its objects closed.

    An object stays open if it is described in several parts, such as `allOf`, because none of them
    lists all properties. With `strict`, objects without any properties are closed too, and one that
    would stay open raises InvalidRequest for `field`. Its message begins with `name`.
    """
    closer = _Closer(field, name or field, strict, set(_shared_references(schema)))
    result: dict[str, Any] = closer.close(schema, "", stays_open=False)
    return result


def _shared_references(schema: Any) -> Iterator[str]:
    """Yield the references to schemas that describe only a part of an object."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _shared_references(inner)
    elif isinstance(schema, dict):
        parts = schema.get("allOf")
        if isinstance(parts, list) and len(parts) + ("properties" in schema) > 1:
            yield from (part["$ref"] for part in parts if _refers(part))
        if "properties" in schema and _refers(schema):
            yield schema["$ref"]
        for inner in schema.values():
            yield from _shared_references(inner)


def _refers(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("$ref"), str)


class _Closer:
    def __init__(self, field: str, name: str, strict: bool, shared: set[str]) -> None:
        self._field = field
        self._name = name
        self._strict = strict
        self._shared = shared

    def close(self, schema: Any, path: str, *, stays_open: bool) -> Any:
        if not isinstance(schema, dict):
            return schema
        is_part = stays_open or self._has_several_parts(schema)
        closed = schema | self._close_inner(schema, path, are_parts=is_part)
        if self._is_open(schema):
            if not is_part and self._lists_required(schema):
                closed["additionalProperties"] = False
            elif self._strict:
                raise InvalidRequest(
                    f"{self._name}{path}: strict needs an object that one schema describes, with"
                    " all required properties: write its parts as one schema, or leave strict out",
                    field=self._field,
                )
        return closed

    def _close_inner(
        self, schema: Mapping[str, Any], path: str, *, are_parts: bool
    ) -> dict[str, Any]:
        """Return the schemas inside, closed. With `are_parts`, `anyOf` and the like stay open."""
        closed: dict[str, Any] = {}
        for name in schema.keys() & _INNER:
            inner, inner_path = schema[name], f"{path}.{name}"
            if name in _MAPS and isinstance(inner, dict):
                closed[name] = {
                    key: self.close(
                        value, f"{inner_path}.{key}", stays_open=f"#/{name}/{key}" in self._shared
                    )
                    for key, value in inner.items()
                }
            elif isinstance(inner, list):
                stays_open = are_parts and name != "prefixItems"
                closed[name] = [
                    self.close(value, f"{inner_path}[{i}]", stays_open=stays_open)
                    for i, value in enumerate(inner)
                ]
            else:
                closed[name] = self.close(inner, inner_path, stays_open=False)
        return closed

    def _is_open(self, schema: Mapping[str, Any]) -> bool:
        """Return whether the schema is for objects, and says nothing of further properties."""
        if "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return False
        if isinstance(schema.get("properties"), dict):
            return True
        kinds = schema.get("type")
        is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
        return self._strict and is_object and not any(name in schema for name in _PARTS)

    def _has_several_parts(self, schema: Mapping[str, Any]) -> bool:
        parts = schema.get("allOf")
        has_several = isinstance(parts, list) and len(parts) > 1
        return has_several or ("properties" in schema and any(name in schema for name in _PARTS))

    def _lists_required(self, schema: Mapping[str, Any]) -> bool:
        required, properties = schema.get("required", ()), schema.get("properties", {})
        if not isinstance(required, list | tuple) or not isinstance(properties, dict):
            return False
        at_least = schema.get("minProperties", 0)
        has_enough = isinstance(at_least, int) and at_least <= len(properties)
        return has_enough and all(name in properties for name in required)
