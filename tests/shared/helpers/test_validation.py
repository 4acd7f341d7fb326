"""Errors of values have plain words, without names of types and without regular expressions."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml
from msgspec import Meta, Struct

import shared
from shared.helpers import patterns
from shared.helpers.validation import complaint_of, reason_of
from shared.protocol.images import ImageSize

PRODUCT = Path(shared.__file__).parents[1]


class Point(Struct, forbid_unknown_fields=True, tag=True):
    x: int


class Line(Struct, forbid_unknown_fields=True, tag=True):
    ends: list[Point]
    colour: Literal["red", "blue"] = "red"


def bounded(kind: Any, **limits: Any) -> Any:
    return Annotated[kind, Meta(**limits)]


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (int, "a", "must be a whole number, not a text"),
        (int, True, "must be a whole number, not true or false"),
        (float | None, [], "must be a number or null, not a list"),
        (str, None, "must be a text, not null"),
        (bool, {}, "must be true or false, not an object"),
        (Point, 3, "must be an object, not a whole number"),
        (int, 1.5, "must be a whole number, not a decimal number"),
        (int, date(2026, 1, 2), "must be a whole number, not a date"),
        (bounded(int, ge=1), 0, "must be at least 1"),
        (bounded(int, le=10), 11, "must be at most 10"),
        (bounded(float, ge=0.5), 0.25, "must be at least 0.5"),
        (bounded(float, gt=0.0), 0.0, "must be more than 0"),
        (bounded(float, lt=2.0), 2.0, "must be less than 2"),
        (bounded(int, multiple_of=8), 9, "must be a multiple of 8"),
        (bounded(str, min_length=1), "", "must have at least 1 character"),
        (bounded(str, max_length=3), "four", "must have at most 3 characters"),
        (bounded(list[int], max_length=2), [1, 2, 3], "must have at most 2 items"),
        (bounded(dict[str, int], min_length=1), {}, "must have at least 1 entry"),
        (tuple[int, int], [1], "must have 2 items"),
        (ImageSize, "abc", "must be a width and a height in pixels, such as 1024x768"),
        (Literal["a", "b"], "c", "'c' is not one of the possible values"),
    ],
)
def test_reasons_have_plain_words(kind: Any, value: Any, reason: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"field": value}, dict[str, kind])
    complaint = complaint_of(refused.value)
    assert (complaint.path, complaint.reason) == ("[...]", reason)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"type": "Line"}, "at.ends: the field is missing"),
        ({"type": "Line", "ends": [], "color": 1}, "at.color: unknown field; did you mean colour?"),
        (
            {"type": "Line", "ends": [{"type": "Point", "x": 1, "y": 2}]},
            "at.ends[0].y: unknown field",
        ),
        (
            {"type": "Line", "ends": [], "colour": "rad"},
            "at.colour: 'rad' is not one of the possible values: blue, red; did you mean red?",
        ),
        (
            {"type": "line"},
            "at.type: 'line' is not one of the possible values: Line, Point; did you mean Line?",
        ),
        ({"type": None}, "at.type: must be a text, not null"),
        ([], "at: must be an object, not a list"),
    ],
)
def test_a_complaint_names_the_field_the_allowed_and_the_nearest(value: Any, sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(value, Line | Point)
    assert complaint_of(refused.value, Line | Point, "at").sentence() == sentence


@pytest.mark.parametrize(
    ("decode", "text", "reason"),
    [
        (msgspec.json.decode, "{", "it ends too early"),
        (msgspec.json.decode, '{"a" 1}', "byte 6 is wrong"),
        (msgspec.json.decode, "1e999", "must be a number that 64 bits can hold"),
        (json.loads, "[\n1 2]", "it is not JSON from line 2 on"),
        (yaml.safe_load, "a: b: c", "it is not YAML from line 1, column 5 on"),
        (yaml.safe_load, "a: !!python/object:x y", "it is not YAML from line 1, column 4 on"),
        (yaml.safe_load, "a: \x01", "it has a character that YAML does not allow"),
    ],
)
def test_decoders_have_no_words_of_their_own(decode: Any, text: str, reason: str) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError, yaml.YAMLError)) as refused:
        decode(text)
    assert reason_of(refused.value) == reason


def test_every_pattern_has_words() -> None:
    """A pattern that is written at its field would be shown to users."""
    used: set[str] = set()
    for file in [*PRODUCT.glob("shared/**/*.py"), *PRODUCT.glob("workers/**/*.py")]:
        for name in re.findall(r"Meta\([^#]*?\bpattern=([^,)\s]+)", file.read_text()):
            assert name.startswith("patterns."), file
            used.add(getattr(patterns, name.removeprefix("patterns.")))
    assert used == patterns.WORDS.keys()
