"""Clips for requests: short animated images. A request may sample some of the frames."""

import base64
import functools
import io
import random

import numpy as np
from PIL import Image

from shared.protocol.requests import VideoPart, VideoURL

NUM_CLIPS = 6
NUM_FRAMES = 9
SIZE = (84, 56)
FRAME_MS = 250
# With few clips, many requests sample other frames of a clip that is cached.
NUMS_WANTED = (None, 2, 4, 6)


def make_part(rng: random.Random) -> VideoPart:
    url = _data_url(rng.randrange(NUM_CLIPS))
    return VideoPart(VideoURL(url, num_frames=rng.choice(NUMS_WANTED)))


@functools.cache
def _data_url(number: int) -> str:
    """Return a GIF of frames that differ from each other."""
    noise = np.random.default_rng(number)
    frames = [
        Image.fromarray(noise.integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)).quantize(16)
        for _ in range(NUM_FRAMES)
    ]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)
    return "data:image/gif;base64," + base64.b64encode(file.getvalue()).decode()
