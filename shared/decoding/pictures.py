"""Conversion of single images in Pillow: upright orientation and RGB."""

import numpy as np
from PIL import Image

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that makes an image upright, by its EXIF orientation."""


def to_upright(image: Image.Image, orientation: int) -> Image.Image:
    """Return the image turned upright."""
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the image over white, with the upper 8 bits of 16-bit grey."""
    if image.mode.startswith("I"):  # Pillow would clip 16-bit grey to white instead of scaling it
        grey = np.asarray(image) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(white, rgba).convert("RGB")
