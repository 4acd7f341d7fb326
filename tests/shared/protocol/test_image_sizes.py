"""Sizes of images that a stage names, and those of its rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.protocol.images import ImageParams, SizeRule, check_size, resolve_image

RULE = SizeRule(16, 64 * 64, 128)
SIDES = st.integers(1, 200)


@given(width=SIDES, height=SIDES)
def test_a_rule_allows_multiples_up_to_its_limits(width: int, height: int) -> None:
    is_allowed = (
        width % 16 == height % 16 == 0 and max(width, height) <= 128 and width * height <= 4096
    )
    assert RULE.allows(f"{width}x{height}") == is_allowed


@pytest.mark.parametrize("size", ["", "48", "48x", "x48", "0x48", "48x48x48", "48 x 48", "auto"])
def test_other_strings_are_no_sizes(size: str) -> None:
    assert not RULE.allows(size)
    with pytest.raises(InvalidRequest) as refused:
        check_size(size, ["100x100"], RULE, "size")
    assert refused.value.field == "size"
    assert refused.value.message == (
        f"size: {size!r} is not available; available: 100x100, and multiples of 16 up to 128,"
        " together up to 4096 pixels"
    )


def test_named_sizes_need_not_follow_the_rule() -> None:
    check_size("100x100", ["100x100"], RULE, "size")
    check_size("100x100", ["100x100"], None, "size")
    assert resolve_image(ImageParams("32x16"), {}, ["100x100"], rule=RULE).size == "32x16"
    with pytest.raises(InvalidRequest, match=r"'32x16' is not available; available: 100x100$"):
        resolve_image(ImageParams("32x16"), {}, ["100x100"])
