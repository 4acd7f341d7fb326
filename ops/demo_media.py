"""The demo's spoken answer and painted image: made, judged simply, and drawn in a terminal."""

import asyncio
import base64
import io
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

from shared.bus.bus import Bus
from shared.client import ask, follow_output, new_request_id, read_media
from shared.protocol.images import ImageParams
from shared.protocol.records import AudioChunk, Failure, ImageRecord, TokenChunk
from shared.protocol.requests import GenerateRequest

FULL_SCALE = 2**15
# The demo's voice takes about a tenth of a second for a character of its text.
MIN_CHARACTER_S, MAX_CHARACTER_S = 0.04, 0.3
# Speech of the demo's voice is at -30 to -15 dB of full scale.
MIN_LOUDNESS_DB, MAX_LOUDNESS_DB = -40.0, -6.0
# Two colours are at most 442 apart, and a painted one is not exactly what was asked for.
MAX_COLOUR_DISTANCE = 150.0
MIN_SHAPE_SHARE, MAX_SHAPE_SHARE = 0.02, 0.6
# A braille character has two columns of four dots; these are the bits of the rows.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BRAILLE = 0x2800


class DemoFailed(Exception):
    """A request of the demo has failed; the message is its error's."""


@dataclass(frozen=True, slots=True)
class Speech:
    """A spoken answer."""

    text: str
    samples: NDArray[np.int16]
    sample_rate: int

    @property
    def length_s(self) -> float:
        return len(self.samples) / self.sample_rate

    @property
    def loudness_db(self) -> float:
        """Root mean square of the samples, in decibels of full scale."""
        power = float(np.mean(np.square(self.samples, dtype=np.float64))) if self.length_s else 0.0
        return 10 * math.log10(max(power, 1.0) / FULL_SCALE**2)

    def find_fault(self) -> str | None:
        """Say what is wrong with the sound; None if nothing is."""
        least, most = (len(self.text) * s for s in (MIN_CHARACTER_S, MAX_CHARACTER_S))
        if not least <= self.length_s <= most:
            return f"it lasts {self.length_s:.1f} s, not {least:.1f} to {most:.1f} s"
        if not MIN_LOUDNESS_DB <= self.loudness_db <= MAX_LOUDNESS_DB:
            allowed = f"{MIN_LOUDNESS_DB:g} to {MAX_LOUDNESS_DB:g} dB"
            return f"its loudness is {self.loudness_db:.0f} dB of full scale, not {allowed}"
        return None

    def draw(self, columns: int = 60, rows: int = 3) -> str:
        """Return the waveform in lines of braille characters."""
        height = 4 * rows
        slices = np.array_split(np.abs(self.samples.astype(np.float64)), 2 * columns)
        peaks = np.array([part.max(initial=0) for part in slices])
        peaks /= max(1.0, peaks.max())
        distance = np.abs(np.arange(height) + 0.5 - height / 2)
        # The line in the middle is drawn where there is silence.
        is_dot = distance[:, None] <= np.maximum(0.5, peaks * height / 2)[None, :]
        cells = is_dot.reshape(rows, 4, columns, 2).transpose(0, 2, 1, 3)
        return "\n".join("".join(map(_to_braille, line)) for line in cells)


def _to_braille(is_dot: NDArray[np.bool_]) -> str:
    return chr(BRAILLE + int(np.sum(np.array(DOTS)[is_dot])))


@dataclass(frozen=True, slots=True)
class Painting:
    """A painted image of a shape in one colour on another."""

    png: bytes
    shape: tuple[int, int, int]
    """The colour that the shape was to have."""
    background: tuple[int, int, int]

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """[height, width, 3]"""
        with Image.open(io.BytesIO(self.png)) as image:
            return np.asarray(image.convert("RGB"))

    def shares(self) -> tuple[float, float]:
        """Return the parts of the pixels that are nearer to each of the two colours."""
        pixels = self.pixels.astype(np.float64)
        far = [np.linalg.norm(pixels - colour, axis=2) for colour in (self.shape, self.background)]
        is_coloured = np.minimum(*far) < MAX_COLOUR_DISTANCE
        return (
            float(np.mean(is_coloured & (far[0] < far[1]))),
            float(np.mean(is_coloured & (far[0] >= far[1]))),
        )

    def find_fault(self) -> str | None:
        """Say what is wrong with the colours; None if nothing is."""
        shape, background = self.shares()
        if not MIN_SHAPE_SHARE <= shape <= MAX_SHAPE_SHARE:
            return f"{100 * shape:.0f} % of it have the colour of the shape"
        if background < 1 - MAX_SHAPE_SHARE:
            return f"{100 * background:.0f} % of it have the colour of the background"
        return None

    def draw(self, rows: int = 10) -> Text:
        """Return a small image of half blocks: each character has two pixels."""
        with Image.open(io.BytesIO(self.png)) as image:
            small = image.convert("RGB").resize((2 * rows, 2 * rows))
        pixels = np.asarray(small)
        text = Text()
        for row in range(rows):
            for upper, lower in zip(pixels[2 * row], pixels[2 * row + 1], strict=True):
                colours = Color.from_rgb(*map(int, upper)), Color.from_rgb(*map(int, lower))
                text.append("▀", Style(color=colours[0], bgcolor=colours[1]))
            text.append("\n")
        return text


async def paint(bus: Bus, prompt: str, seed: int) -> bytes:
    """Send a request for an image and return its PNG file. Raises DemoFailed."""
    request = GenerateRequest(
        "demo", prompt=prompt, image=ImageParams(seed=seed), outputs=["image"]
    )
    request_id = new_request_id()
    async for record in ask(bus, request, request_id):
        if isinstance(record, Failure):
            raise DemoFailed(f"{record.error.code}: {record.error.message}")
    async for painted in follow_output(bus, request_id, "image"):
        if isinstance(painted, ImageRecord):
            return await read_media(bus, painted.media)
    raise DemoFailed("the log of the request has no image")


async def speak(bus: Bus, request: GenerateRequest) -> Speech:
    """Send a request for an answer and its sound. Raises DemoFailed."""
    request_id, parts = new_request_id(), []
    reading = asyncio.create_task(_read_sound(bus, request_id))
    try:
        async for record in ask(bus, request, request_id):
            if isinstance(record, Failure):
                raise DemoFailed(f"{record.error.code}: {record.error.message}")
            if isinstance(record, TokenChunk):
                parts += [choice.text for choice in record.choices]
        chunks = await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    pcm = b"".join(base64.b64decode(chunk.pcm) for chunk in chunks)
    sample_rate = chunks[0].sample_rate if chunks else 1
    return Speech("".join(parts), np.frombuffer(pcm, "<i2"), sample_rate)


async def _read_sound(bus: Bus, request_id: str) -> list[AudioChunk]:
    records = follow_output(bus, request_id, "audio")
    return [record async for record in records if isinstance(record, AudioChunk)]
