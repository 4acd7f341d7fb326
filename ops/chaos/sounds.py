"""Sounds for requests, and clips with a sound. A model hears it alone, or with the frames."""

import base64
import functools
import io
import random
from fractions import Fraction

import av
import numpy as np
import soundfile
from numpy.typing import NDArray

from shared.protocol.requests import AudioPart, AudioURL, VideoPart, VideoURL

NUM_SOUNDS = 6
NUM_CLIPS = 4
RATE = 16_000
NUM_FRAMES = 9
FPS = 4
SIZE = (84, 56)
# With few clips, many requests have the same clip with its sound or without.
HEARD_SHARE = 0.7


def make_part(rng: random.Random) -> AudioPart | VideoPart:
    if rng.random() < 0.5:
        return AudioPart(AudioURL(_sound_url(rng.randrange(NUM_SOUNDS))))
    url = _clip_url(rng.randrange(NUM_CLIPS))
    return VideoPart(VideoURL(url, use_audio=rng.random() < HEARD_SHARE))


def _draw_tones(number: int, num_samples: int) -> NDArray[np.float32]:
    """Return different tones of a tenth of a second each."""
    rng = np.random.default_rng(number)
    pitches = np.repeat(rng.uniform(0.05, 1.5, -(-num_samples // 1600)), 1600)[:num_samples]
    return np.asarray(0.4 * np.sin(np.cumsum(pitches)), np.float32)


@functools.cache
def _sound_url(number: int) -> str:
    file = io.BytesIO()
    soundfile.write(file, _draw_tones(number, 4_000 * (1 + number)), RATE, format="FLAC")
    return _data_url("audio/flac", file)


@functools.cache
def _clip_url(number: int) -> str:
    """Return an AVI of JPEG files and samples, which are encoded equally in every process."""
    noise = np.random.default_rng(number)
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        video = output.add_stream("mjpeg", rate=FPS)
        video.width, video.height, video.pix_fmt = *SIZE, "yuvj420p"
        video.codec_context.thread_count = 1
        audio = output.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for place in range(NUM_FRAMES):
            pixels = noise.integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format="yuvj420p")
            frame.pts, frame.time_base = place, Fraction(1, FPS)
            output.mux(video.encode(frame))
        output.mux(video.encode())
        samples = _draw_tones(100 + number, RATE * (1 + number) // 2)
        sound = av.AudioFrame.from_ndarray((samples * 2**15).astype(np.int16)[None], "s16", "mono")
        sound.sample_rate, sound.pts = RATE, 0
        output.mux(audio.encode(sound))
        output.mux(audio.encode())
    return _data_url("video/avi", file)


def _data_url(kind: str, file: io.BytesIO) -> str:
    return f"data:{kind};base64," + base64.b64encode(file.getvalue()).decode()
