"""Images as files and as URLs."""

import base64
import io

import numpy as np
from PIL import Image


def png(seed: int = 0, size: tuple[int, int] = (112, 84)) -> bytes:
    """Return an image of noise as a PNG file; `size` is its width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Return a file as a data URL; `kind` is its media type."""
    return f"data:{kind};base64," + base64.b64encode(data).decode()
