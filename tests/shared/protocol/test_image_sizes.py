"""Sizes of images by name and by rule, and the names of their parameters in diffusers."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.protocol.images import ImageParams, PaintParams, SizeRule, check_size, resolve_image

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


def test_the_names_of_diffusers_are_read() -> None:
    request = {
        "seed": 42,
        "cfg_scale": 4.0,
        "num_images_per_prompt": 1,
        "num_inference_steps": 50,
        "height": 1024,
        "width": 768,
    }
    params = resolve_image(msgspec.convert(request, ImageParams), {"steps": 9}, ["768x1024"])
    assert params == PaintParams("768x1024", 1, 50, 4.0, seed=42)
    same = ImageParams("768x1024", 1, 50, 4.0, seed=42, true_cfg_scale=4.0, width=768, height=1024)
    assert resolve_image(same, {}, ["768x1024"]) == params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (ImageParams(n=1, num_images_per_prompt=2), "image.num_images_per_prompt: 2 contradicts n"),
        (ImageParams(guidance=2.0, cfg_scale=3.0), "image.cfg_scale: 3.0 contradicts guidance"),
        (ImageParams("48x48", width=48, height=64), "image.width: 48x64 contradicts size, 48x48"),
        (ImageParams(width=48), "image.height: required with width"),
        (ImageParams(height=48), "image.width: required with height"),
        (ImageParams(width=48, height=64), "image.size: '48x64' is not available"),
    ],
)
def test_two_names_of_a_value_must_agree(params: ImageParams, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_image(params, {}, ["48x48"])
    assert refused.value.message.startswith(message)
    assert refused.value.field == message.partition(":")[0]


def test_images_have_no_frames() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `frames`"):
        msgspec.convert({"frames": 5}, ImageParams)
