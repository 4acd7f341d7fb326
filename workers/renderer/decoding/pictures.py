"""Single images in Pillow: upright, RGB, and without the scans that cost time alone."""

import re
from itertools import islice

import numpy as np
from PIL import Image, ImageOps

# A decoder goes over all pixels of a progressive JPEG in every scan, and a scan may be 31 bytes
# long: 172 KB of scans took 11 seconds. Encoders write about ten.
MAX_SCANS = 100
# The beginning of every scan that libjpeg takes: 1 to 4 components, and the length for so many.
_SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")


def has_too_many_scans(data: bytes) -> bool:
    """Return whether a JPEG file has more than MAX_SCANS."""
    return any(islice(_SCAN.finditer(data), MAX_SCANS, None))


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """Return the image as its EXIF block turns it, over white, with the upper 8 bits of grey."""
    ImageOps.exif_transpose(image, in_place=True)
    return to_rgb(image)


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
