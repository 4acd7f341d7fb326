"""Images to edit, by the URLs that the parameters of a request have for them."""

import hashlib
import io
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


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url_of(file: bytes) -> str:
    return f"media:{hashlib.sha256(file).hexdigest()}"


FILES = {url_of(file): file for n, size in enumerate(SIZES) if (file := file_of(draw(size, n)))}
SQUARE, WIDE, TALL = FILES


def image_of(url: str) -> Image.Image:
    return Image.open(io.BytesIO(FILES[url]))


def pixels_of(url: str) -> Any:
    return np.asarray(image_of(url))
