"""Errors of values have plain words, without names of types and without regular expressions."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

import shared
from shared.helpers import patterns
from shared.helpers.validation import split_validation_error
from shared.protocol.images import ImageSize

PRODUCT = Path(shared.__file__).parents[1]


class Point(Struct, forbid_unknown_fields=True):
    x: int


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
    assert split_validation_error(refused.value) == (reason, "[...]")


def test_every_pattern_has_words() -> None:
    """A pattern that is written at its field would be shown to users."""
    used: set[str] = set()
    for file in [*PRODUCT.glob("shared/**/*.py"), *PRODUCT.glob("workers/**/*.py")]:
        for name in re.findall(r"Meta\([^#]*?\bpattern=([^,)\s]+)", file.read_text()):
            assert name.startswith("patterns."), file
            used.add(getattr(patterns, name.removeprefix("patterns.")))
    assert used == patterns.WORDS.keys()
