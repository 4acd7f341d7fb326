"""Valid messages of a type to begin with: the smallest one, and one with all fields."""

import contextlib
import types
import typing
from typing import Any

import msgspec
from msgspec import inspect

MAX_DEPTH = 8
_TEXTS = ("a", "0" * 64, "media:" + "0" * 64, "512x512", "data:,", "a.b")


def json_messages(kind: Any) -> list[bytes]:
    return [msgspec.json.encode(value) for value in _valid(kind, msgspec.json)]


def msgpack_messages(kind: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(value) for value in _valid(kind, msgspec.msgpack)]


def structs_of(kind: Any) -> list[Any]:
    """Return valid values of a Struct type itself."""
    return [msgspec.msgpack.decode(data, type=kind) for data in msgpack_messages(kind)]


def _valid(kind: Any, codec: Any) -> list[Any]:
    """Return values that the type's own decoder accepts, for each member of a union."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    values: list[Any] = []
    for member in typing.get_args(kind) if is_union else (kind,):
        for is_full in (False, True):
            value = _value(inspect.type_info(member), is_full, MAX_DEPTH)
            try:
                codec.decode(codec.encode(value), type=kind)
            except msgspec.MsgspecError:
                continue
            values.append(value)
    return values


def _value(kind: inspect.Type, is_full: bool, depth: int) -> Any:
    match kind:
        case inspect.Metadata():
            return _value(kind.type, is_full, depth)
        case inspect.StructType():
            return _struct(kind, is_full, depth)
        case inspect.UnionType():
            return _member(kind, is_full, depth)
        case inspect.DictType():
            if not is_full or depth <= 0:
                return {}
            return {_value(kind.key_type, True, 0): _value(kind.value_type, True, depth - 1)}
        case inspect.TupleType():
            return [_value(item, is_full, depth - 1) for item in kind.item_types]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            count = kind.min_length or int(is_full and depth > 0)
            return [_value(kind.item_type, is_full, depth - 1)] * count
    return _scalar(kind)


def _scalar(kind: inspect.Type) -> Any:
    match kind:
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StrType():
            return _text(kind)
        case inspect.IntType():
            return max(kind.ge or 0, 0 if kind.gt is None else kind.gt + 1)
        case inspect.FloatType():
            low = 0.0 if kind.ge is None else kind.ge
            return low if kind.gt is None else kind.gt + (0.5 if kind.le is None else kind.le / 2)
        case inspect.BytesType():
            return b"x"
        case inspect.NoneType():
            return None
    return True


def _struct(kind: inspect.StructType, is_full: bool, depth: int) -> Any:
    values: dict[str, Any] = {}
    if kind.tag_field is not None:
        values[kind.tag_field] = kind.tag
    optional: list[str] = []
    for field in kind.fields:
        if field.required or kind.array_like or (is_full and depth > 0):
            values[field.encode_name] = _value(field.type, is_full, depth - 1)
            optional += [] if field.required else [field.encode_name]
    if kind.array_like:
        return list(values.values())
    # Not every combination of fields is valid: then one of them, or none.
    for left_out in (set[str](), *({*optional} - {name} for name in optional), {*optional}):
        some = {name: value for name, value in values.items() if name not in left_out}
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(some, kind.cls)
            return some
    return values


def _member(kind: inspect.UnionType, is_full: bool, depth: int) -> Any:
    """Return null where that is allowed and little is wanted, else a value of the first member."""
    rest = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    if len(rest) < len(kind.types) and (not is_full or depth <= 0):
        return None
    return _value(rest[0], is_full, depth)


def _text(kind: inspect.StrType) -> str:
    length = kind.min_length or 1
    for text in _TEXTS:
        try:
            meta = msgspec.Meta(pattern=kind.pattern)
            msgspec.convert(text * length, typing.Annotated[str, meta])
            return text * length
        except msgspec.ValidationError:
            continue
    return "a" * length
