"""Images to edit, by the URLs that the parameters of a request have for them."""

import hashlib
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((50, 50), (90, 45), (30, 70))


def draw(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Return an image with smooth colours and some noise."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    noise = rng.integers(0, 24, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(np.asarray(small.resize(size, Image.Resampling.BICUBIC)) // 2 + noise)


def _url(number: int) -> str:
    return f"media:{hashlib.sha256(b'%d' % number).hexdigest()}"


IMAGES = {_url(number): draw(size, number) for number, size in enumerate(SIZES)}
SQUARE, WIDE, TALL = IMAGES


def pixels_of(url: str) -> Any:
    return np.asarray(IMAGES[url])
