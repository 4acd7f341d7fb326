"""Frames are resized as torch does it, which transformers' processors of videos use."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.models import resizing
from shared.models.resizing import resize_bicubic

SIDES = st.integers(1, 160)
# torch fails an internal assertion when one pixel is to remain.
RESIZED = st.integers(2, 160)


@given(SIDES, SIDES, RESIZED, RESIZED, st.integers(0, 99), st.booleans())
def test_every_size_is_resized_as_by_torch(
    rows: int, columns: int, height: int, width: int, seed: int, is_hard: bool
) -> None:
    """Black and white are hard: results beyond them are cut off after each axis."""
    frame = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    if is_hard:
        frame = (frame // 128 * 255).astype(np.uint8)
    planar = torch.from_numpy(frame.transpose(2, 0, 1).copy())[None]
    expected = torch.nn.functional.interpolate(
        planar, size=(height, width), mode="bicubic", antialias=True
    )
    np.testing.assert_array_equal(resize_bicubic(frame, height, width), expected[0].numpy())


def test_large_frames_are_resized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    whole = resize_bicubic(frame, 28, 56)
    monkeypatch.setattr(resizing, "MAX_VALUES", 1000)
    np.testing.assert_array_equal(resize_bicubic(frame, 28, 56), whole)
