"""Bodies as values of their types, with or without unknown fields. Pure."""

from collections.abc import Set
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from shared.errors import InvalidRequest
from shared.helpers.validation import kinds_of, reason_of
from shared.protocol.value_limits import check_json
from workers.gateway.http.errors import UnknownParameter, validation_error

T = TypeVar("T")


def decoded(
    body: bytes,
    body_type: type[T],
    unsupported: frozenset[str] = frozenset(),
    *,
    root: str = "",
    ignores_unknown: bool = False,
) -> T:
    """Return a body of JSON as this type. Raises a RequestError that names the wrong field.

    `unsupported` are names of fields that are known but not implemented, see `validation_error`.
    The path of the wrong field begins with `root`.
    """
    try:
        check_json(body)
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        refusal = validation_error(error, unsupported, body_type, root)
        if not (ignores_unknown and isinstance(refusal, UnknownParameter)):
            raise refusal from error
        value = without_unknown(msgspec.json.decode(body), body_type, unsupported)
        result: T = converted(value, body_type, unsupported, root=root)
        return result
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body is not valid JSON: {reason_of(error)}"
        raise InvalidRequest(message, field=root or None) from error


def converted(
    value: Any,
    body_type: Any,
    unsupported: frozenset[str] = frozenset(),
    *,
    root: str = "",
    ignores_unknown: bool = False,
    strict: bool = True,
) -> Any:
    """Return a decoded value as this type, like `decoded`. Unless `strict`, it may be texts."""
    if ignores_unknown:
        value = without_unknown(value, body_type, unsupported)
    try:
        return msgspec.convert(value, body_type, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        raise validation_error(error, unsupported, body_type, root) from error


def without_unknown(value: Any, body_type: Any, extra: Set[str] = frozenset()) -> Any:
    """Return a decoded body without the fields that its type does not have.

    Fields of the body itself that are in `extra` stay.
    """
    return _pruned(value, inspect.type_info(body_type), extra)


def _pruned(value: Any, kind: inspect.Type, extra: Set[str] = frozenset()) -> Any:
    if isinstance(value, list):
        items = next((k.item_type for k in kinds_of(kind) if isinstance(k, inspect.ListType)), None)
        return value if items is None else [_pruned(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    structs = [k for k in kinds_of(kind) if isinstance(k, inspect.StructType)]
    fits = [k for k in structs if k.tag_field is None or value.get(k.tag_field) == k.tag]
    if not fits:
        return value
    types = {field.encode_name: field.type for field in fits[0].fields}
    return {
        name: _pruned(inner, types[name]) if name in types else inner
        for name, inner in value.items()
        if name in types or name == fits[0].tag_field or name in extra
    }
