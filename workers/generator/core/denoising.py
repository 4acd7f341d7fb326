"""Denoising steps of images: their times, their noise, and the interface of what computes them.

An image begins as noise at time 0 and is finished at time 1. Each step moves the latents on a
straight line towards what the network takes for the finished image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Latents = NDArray[np.floating[Any]]
"""An image on its way, [channels, height, width]."""
Pixels = NDArray[np.uint8]
"""A finished image, [height, width, 3]."""


@dataclass(frozen=True, slots=True)
class Step:
    """The input of one step of one image."""

    latents: Latents
    tokens: tuple[int, ...]
    negative: tuple[int, ...]
    """The tokens that the image is guided away from; empty for those of no text."""
    guidance: float
    time: float
    next_time: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of one step."""

    latents: Latents
    finished: Latents
    """What the network takes for the finished image."""


class ImageModel(Protocol):
    """Paints images of a text. It keeps no state of an image."""

    dtype: np.dtype[np.floating[Any]]
    """That of latents."""

    def encode(self, text: str, field: str) -> tuple[int, ...]:
        """The tokens of a text. Raises ContextTooLong, which names `field`."""

    def latents_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """The shape of the latents of an image of this size."""

    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        """One step of each image. All latents have the same shape."""

    def pixels(self, latents: Latents) -> Pixels:
        """The image of finished latents."""


def time_of(step: int, steps: int) -> float:
    """The time before step number `step`, and after the one before it."""
    return step / steps


def noise_of(seed: int, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Latents:
    """The latents that image `number` of a request with this seed begins with.

    They are a function of the two numbers, by a counter-based generator.
    """
    drawn = np.random.Generator(np.random.Philox(key=[seed, number]))
    return drawn.standard_normal(shape).astype(dtype)
