"""Versions of messages between workers, and the version that a message needs of its reader. Pure.

All messages share one version number. It is raised once in a release, with the first field, value
or content part that an older worker must not ignore. These are marked with `since`, or have the
attribute `since_version`. A message needs the version of its newest marked part, so older workers
still read all messages without such parts. Fields that an older worker may ignore are `since(1)`.
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from shared.errors import InvalidRequest, UnsupportedVersion

OLDEST_VERSION = 1
WIRE_VERSION = 3
"""Newest version that this code reads, and the version that it writes."""
VERSION_HEADER = "Pagemill-Version"
"""Header of requests and calls that need a newer reader than the oldest version."""


def readable() -> tuple[int, int]:
    """Return the oldest and the newest version that this worker reads."""
    return OLDEST_VERSION, WIRE_VERSION


def range_words(reads: tuple[int, int] | None) -> str:
    """Return the range of versions that a worker reads as text, `?` if it is unknown."""
    return "?" if reads is None else f"{reads[0]}-{reads[1]}"


def since(version: int, *values: Any) -> Meta:
    """Mark a field that needs a reader of `version` when it is set, or has one of `values`."""
    return Meta(extra={"since": version, "values": values})


def check_version(version: int, message: str) -> None:
    """Raise UnsupportedVersion for a version that this code does not read.

    `message` is the name of the message in the error.
    """
    if version > WIRE_VERSION:
        raise UnsupportedVersion(
            f"{message} has version {version}, and this worker reads versions {OLDEST_VERSION} to"
            f" {WIRE_VERSION}"
        )


def version_header(version: int) -> dict[str, str]:
    """Return the headers of a message that needs `version`."""
    return {VERSION_HEADER: str(version)} if version > OLDEST_VERSION else {}


def version_of(headers: Mapping[str, str] | None) -> int:
    """Return the version that a message with these headers needs.

    Raises InvalidRequest for a header that is not a number.
    """
    value = (headers or {}).get(VERSION_HEADER)
    if value is None:
        return OLDEST_VERSION
    if not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise InvalidRequest(
            f"the header {VERSION_HEADER} must be a number of at most 9 digits",
            field=VERSION_HEADER,
        )
    return int(value)


class _Field(NamedTuple):
    name: str
    default: Any
    version: int
    values: tuple[Any, ...]
    """Values that need the version; empty for all values but the default."""
    is_walked: bool
    """Whether the field may contain Structs."""


def needed_version(message: Any) -> int:
    """Return the version that a reader of a Struct, or of a container of Structs, needs."""
    if isinstance(message, Struct):
        needed: int = getattr(type(message), "since_version", OLDEST_VERSION)
        for field in _marked_fields(type(message)):
            value = getattr(message, field.name)
            if value != field.default:
                needed = max(needed, _version_of_value(field, value))
        return needed
    if isinstance(message, dict):
        message = [*message.values()]
    elif not isinstance(message, list | tuple):
        return OLDEST_VERSION
    return max(map(needed_version, message), default=OLDEST_VERSION)


def needed_for(kind: type[Struct], values: Mapping[str, Any]) -> int:
    """Return the version that a reader needs for these field values of a `kind`."""
    return max(
        (_version_of_value(f, values[f.name]) for f in _marked_fields(kind) if f.name in values),
        default=OLDEST_VERSION,
    )


def _version_of_value(field: _Field, value: Any) -> int:
    needed = needed_version(value) if field.is_walked else OLDEST_VERSION
    return max(needed, field.version) if not field.values or value in field.values else needed


@functools.cache
def _marked_fields(kind: type[Struct]) -> tuple[_Field, ...]:
    """Return the fields of a Struct that its version depends on."""
    fields = []
    for field in msgspec.structs.fields(kind):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        version, values = mark_of(field.type) or (OLDEST_VERSION, ())
        is_walked = _holds_structs(field.type)
        if version > OLDEST_VERSION or is_walked:
            fields.append(_Field(field.name, default, version, values, is_walked))
    return tuple(fields)


def mark_of(hint: Any) -> tuple[int, tuple[Any, ...]] | None:
    """Return the version and the values with which `since` has marked a field's type."""
    if get_origin(hint) is Annotated:
        for meta in get_args(hint)[1:]:
            if isinstance(meta, Meta) and meta.extra and "since" in meta.extra:
                return meta.extra["since"], meta.extra["values"]
    return None


def _holds_structs(hint: Any) -> bool:
    if isinstance(hint, TypeVar):
        return True
    if isinstance(hint, type) and issubclass(hint, Struct):
        return True
    return any(_holds_structs(part) for part in get_args(hint))
