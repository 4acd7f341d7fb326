"""Plain words for bad input: one translator of the errors of decoders, for every way in.

A complaint names the field, what is wrong with its value, what is allowed, and the name that may
have been meant. It has no names of types and no words of the decoder.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

import msgspec
import yaml
from msgspec import inspect

from shared.errors import InvalidRequest
from shared.helpers.patterns import WORDS

TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "null": "null",
    "array": "a list",
    "object": "an object",
    "bytes": "bytes",
}
"""Words for the types that msgspec names."""
MAX_SUGGESTED_LEN = 64
"""Limit on names for which a similar one is searched, which takes long for long ones."""
_VALUES = TYPES | {
    "float": "a decimal number",
    "NoneType": "null",
    "date": "a date",
    "datetime": "a time",
    "set": "a set",
    "ext": "an extension of msgpack",
}
_UNITS = {"str": "character", "bytes": "byte", "array": "item", "object": "entry"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_NUMBER = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)")
_MULTIPLE = re.compile(r"Expected `int` that's a multiple of (\d+)")
_LENGTH = re.compile(r"Expected `(\w+)` of (length >=|length <=|at least length) (\d+).*")
_EXACT_LENGTH = re.compile(r"Expected `array` of length (\d+(?: to \d+)?).*")
_PATTERN = re.compile(r"Expected `str` matching regex (.+)", re.DOTALL)
_TYPE = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`)?")
_CHOICE = re.compile(r"Invalid (?P<enum>enum )?value (?P<value>.+)", re.DOTALL)
_FIELD = re.compile(
    r"Object (?:contains (?P<unknown>unknown)|missing required) field `(?P<name>.*)`", re.DOTALL
)
_OTHERS = {
    "Number out of range": "must be a number that 64 bits can hold",
    "Invalid base64 encoded string": "must be base64",
}
_BYTE = re.compile(r"\(byte (\d+)\)")
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


class Complaint(NamedTuple):
    """The reason for which a value does not have its type."""

    path: str
    """Path of the field, also of one that is unknown or missing. Empty for the whole value."""
    reason: str
    kind: Literal["unknown", "missing", "tag", "value"] = "value"
    tag: str = ""
    """The value of a field `type` that has none of its possible values."""

    def sentence(self, whole: str = "the request") -> str:
        """Return the message for the person who sent the value, which is called `whole`."""
        return f"{self.path or whole}: {self.reason}"


def complaint_of(error: msgspec.ValidationError, kind: Any = None, root: str = "") -> Complaint:
    """Return the complaint about a value at the path `root` that is not of the type `kind`.

    Without `kind`, the complaint does not name what is allowed.
    """
    reason, _, path = str(error).partition(" - at `")
    # The path of an error in a mapping's key is the path of the mapping.
    inner = path.removeprefix("key` in `").removesuffix("`").removeprefix("$").removeprefix(".")
    path = _joined(root, inner)
    if field := _FIELD.fullmatch(reason):
        name = field["name"]
        if field["unknown"] is None:
            return Complaint(_joined(path, name), "the field is missing", "missing")
        question = suggest(name, _fields_at(kind, inner))
        return Complaint(_joined(path, name), f"unknown field{question}", "unknown")
    if choice := _CHOICE.fullmatch(reason):
        value = choice["value"]
        text = value[1:-1] if value.startswith("'") else value
        allowed = _values_at(kind, inner)
        values = f": {', '.join(allowed)}{suggest(text, allowed)}" if allowed else ""
        reason = f"{value} is not one of the possible values{values}"
        return Complaint(path, reason, *(() if choice["enum"] else ("tag", text)))
    return Complaint(path, _in_words(reason))


def reason_of(error: Exception) -> str:
    """Return the reason why a file or a value cannot be read, in plain words."""
    match error:
        case msgspec.ValidationError():
            complaint = complaint_of(error)
            return complaint.sentence() if complaint.path else complaint.reason
        case msgspec.DecodeError():
            byte = _BYTE.search(str(error))
            return "it ends too early" if byte is None else f"byte {int(byte[1]) + 1} is wrong"
        case json.JSONDecodeError():
            return f"it is not JSON from line {error.lineno} on"
        case yaml.MarkedYAMLError(problem_mark=yaml.Mark() as mark):
            return f"it is not YAML from line {mark.line + 1}, column {mark.column + 1} on"
        case yaml.YAMLError():
            return "it has a character that YAML does not allow"
        case UnicodeDecodeError():
            return "it is not UTF-8"
        case RecursionError():
            return "it is nested too deeply"
        case OSError() if error.strerror:
            return error.strerror
        case _:
            return str(error)


def invalid_request(error: Exception, kind: Any = None, root: str = "") -> InvalidRequest:
    """Return the error for a request of the type `kind` that cannot be decoded.

    The path of the wrong field begins with `root`.
    """
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest(f"the request is neither JSON nor msgpack: {reason_of(error)}")
    complaint = complaint_of(error, kind, root)
    return InvalidRequest(complaint.sentence(), field=complaint.path or None)


def suggest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of an error, which suggests the most similar name, or an empty text.

    `cutoff` is the least similarity, from 0 to 1.
    """
    if len(name) > MAX_SUGGESTED_LEN:
        return ""
    matches = get_close_matches(name, names, 1, cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""


def kinds_of(kind: inspect.Type) -> Iterable[inspect.Type]:
    """Return the types of a union, or the type itself."""
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _joined(path: str, name: str) -> str:
    return f"{path}{name}" if not path or name.startswith("[") or not name else f"{path}.{name}"


def _in_words(reason: str) -> str:
    """Return a reason of msgspec without the names of types and without regular expressions."""
    if match := _NUMBER.fullmatch(reason):
        return f"must be {_BOUNDS[match[1]]} {match[2].removesuffix('.0')}"
    if match := _MULTIPLE.fullmatch(reason):
        return f"must be a multiple of {match[1]}"
    if match := _LENGTH.fullmatch(reason):
        bound = "at most" if match[2] == "length <=" else "at least"
        return f"must have {bound} {_count(match[3], _UNITS[match[1]])}"
    if match := _EXACT_LENGTH.fullmatch(reason):
        return f"must have {_count(match[1], 'item')}"
    if match := _PATTERN.fullmatch(reason):
        return f"must be {WORDS[ast.literal_eval(match[1])]}"
    if match := _TYPE.fullmatch(reason):
        expected = " or ".join(TYPES.get(name, name) for name in match[1].split(" | "))
        value = "" if match[2] is None else f", not {_VALUES.get(match[2], match[2])}"
        return f"must be {expected}{value}"
    return _OTHERS.get(reason, reason)


def _count(number: str, unit: str) -> str:
    plural = "entries" if unit == "entry" else f"{unit}s"
    return f"{number} {unit if number == '1' else plural}"


def _fields_at(kind: Any, path: str) -> list[str]:
    """Return the names of the fields that an object at this path may have."""
    structs = (each for each in _kinds_at(kind, path) if isinstance(each, inspect.StructType))
    return [field.encode_name for struct in structs for field in struct.fields]


def _values_at(kind: Any, path: str) -> list[str]:
    """Return the values that a field at this path may have; empty if they are not listed."""
    literals = (each for each in _kinds_at(kind, path) if isinstance(each, inspect.LiteralType))
    return [str(value) for literal in literals for value in literal.values]


def _kinds_at(kind: Any, path: str) -> Iterator[inspect.Type]:
    kinds: list[inspect.Type] = [] if kind is None else [inspect.type_info(kind)]
    for step in _STEP.findall(path):
        kinds = [inner for kind in kinds for each in kinds_of(kind) for inner in _after(each, step)]
    for each in kinds:
        yield from kinds_of(each)


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
