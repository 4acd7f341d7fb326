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
    schema: Mapping[str, Any],
    field: str = "",
    name: str = "",
    *,
    strict: bool = False,
    place: str = "",
) -> dict[str, Any]:
    """Return the schema with its objects closed, also those that only references name.

    An object stays open if it is described in several parts, such as `allOf`, because none of them
    lists all properties. With `strict`, objects without any properties are closed too. An object
    that would stay open, and a reference to no part of the schema, raise InvalidRequest for
    `field`. Its message begins with `name`.

    `place` is the JSON pointer of the result in another schema, which local references then name.
    """
    result: dict[str, Any] = _Closer(schema, field, name or field, strict, place).close(schema, "")
    if place:
        result.pop("$id", None)  # References would be relative to it.
    return result


def _schemas_of(root: Any) -> set[int]:
    """Return the `id` of each schema in a document."""
    ids: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in ids:
            ids.add(id(schema))
            waiting.append(_target(root, schema.get("$ref")))
            for name in schema.keys() & _INNER:
                inner = schema[name]
                if name in _MAPS and isinstance(inner, dict):
                    waiting += inner.values()
                else:
                    waiting += inner if isinstance(inner, list) else [inner]
    return ids


def _parts_of_objects(root: Any) -> set[int]:
    """Return the `id` of each schema that describes only a part of an object."""
    ids: set[int] = set()
    waiting: list[Any] = [schema for schema in _dicts_in(root) if _has_several_parts(schema)]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in ids:
            ids.add(id(schema))
            for name in ("allOf", *_PARTS):
                inner = schema.get(name)
                if name == "$ref":
                    waiting.append(_target(root, inner))
                else:
                    waiting += inner if isinstance(inner, list) else [inner]
    return ids


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
    if reference != "#" and not str(reference).startswith("#/"):
        return None
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            root = root.get(key) if isinstance(root, dict) else None
    return root


class _Closer:
    def __init__(
        self, root: Mapping[str, Any], field: str, name: str, strict: bool, place: str
    ) -> None:
        self._root = root
        self._field = field
        self._name = name
        self._strict = strict
        self._place = place
        self._schemas = _schemas_of(root)
        self._parts = _parts_of_objects(root)

    def close(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [self.close(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
        if not isinstance(value, dict):
            return value
        closed = {name: self.close(inner, f"{path}.{name}") for name, inner in value.items()}
        return closed | self._changes(value, path) if id(value) in self._schemas else closed

    def _changes(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        reference = schema.get("$ref")
        if isinstance(reference, str) and _target(self._root, reference) is not None:
            changes["$ref"] = f"#{self._place}{reference[1:]}"
        elif "$ref" in schema and self._strict:
            raise self._refusal(path, f"$ref {reference!r} names no part of this schema")
        if self._is_open(schema):
            if id(schema) not in self._parts and self._lists_required(schema):
                changes["additionalProperties"] = False
            elif self._strict:
                raise self._refusal(
                    path,
                    "strict needs an object that one schema describes, with all required"
                    " properties: write its parts as one schema, or leave strict out",
                )
        return changes

    def _refusal(self, path: str, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{self._name}{path}: {reason}", field=self._field)

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
