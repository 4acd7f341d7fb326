"""Helpers for msgspec's validation errors."""

import ast
import json
import re
from collections.abc import Iterable
from difflib import get_close_matches

import msgspec

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
_UNITS = {"str": "character", "bytes": "byte", "array": "item", "object": "entry"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_NUMBER = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)")
_MULTIPLE = re.compile(r"Expected `int` that's a multiple of (\d+)")
_LENGTH = re.compile(r"Expected `(\w+)` of (length >=|length <=|at least length) (\d+).*")
_EXACT_LENGTH = re.compile(r"Expected `array` of length (\d+(?: to \d+)?).*")
_PATTERN = re.compile(r"Expected `str` matching regex (.+)", re.DOTALL)
_TYPE = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`)?")
_CHOICE = re.compile(r"Invalid enum value (.+)", re.DOTALL)


def split_validation_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split "reason - at `$.a.b`" into ("reason", "a.b"), with the reason in plain words.

    The path of an error in a mapping's key is the path of the mapping.
    """
    reason, _, path = str(error).partition(" - at `")
    path = path.removeprefix("key` in `")
    return _in_words(reason), path.removesuffix("`").removeprefix("$").removeprefix(".")


def suggest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of an error, which suggests the most similar name, or an empty text.

    `cutoff` is the least similarity, from 0 to 1.
    """
    matches = get_close_matches(name, names, 1, cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""


def reason_of(error: Exception) -> str:
    """Return the reason why a file or a value cannot be read, in plain words."""
    match error:
        case msgspec.ValidationError():
            reason, path = split_validation_error(error)
            return f"{path}: {reason}" if path else reason
        case json.JSONDecodeError():
            return f"it is not JSON from line {error.lineno} on"
        case UnicodeDecodeError():
            return "it is not UTF-8"
        case RecursionError():
            return "it is nested too deeply"
        case OSError() if error.strerror:
            return error.strerror
        case _:
            return str(error)


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
    if match := _CHOICE.fullmatch(reason):
        return f"{match[1]} is not one of the possible values"
    if match := _TYPE.fullmatch(reason):
        expected = " or ".join(TYPES.get(name, name) for name in match[1].split(" | "))
        value = "" if match[2] is None else f", not {TYPES.get(match[2], match[2])}"
        return f"must be {expected}{value}"
    return reason


def _count(number: str, unit: str) -> str:
    plural = "entries" if unit == "entry" else f"{unit}s"
    return f"{number} {unit if number == '1' else plural}"


def invalid_request(error: Exception, prefix: str = "") -> InvalidRequest:
    """Return the error for a request that cannot be decoded, with the path of the wrong field.

    The path begins with `prefix`.
    """
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest(f"the request is neither JSON nor msgpack: {error}")
    reason, path = split_validation_error(error)
    field = f"{prefix}{path}"
    return InvalidRequest(f"{field or 'request'}: {reason}", field=field or None)
