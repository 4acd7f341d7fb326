"""Denoising steps of images: times, noise, and the interface of image models.

An image begins as noise at time 0 and is finished at time 1. Each step moves the latents on a
straight line towards the network's prediction of the finished image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Latents = NDArray[np.floating[Any]]
"""Latents of an unfinished image, [channels, height, width]."""
Pixels = NDArray[np.uint8]
"""A finished image, [height, width, 3]."""


@dataclass(frozen=True, slots=True)
class Step:
    """Input of one step of one image."""

    latents: Latents
    tokens: tuple[int, ...]
    negative: tuple[int, ...]
    """Tokens that the image is guided away from; empty for the tokens of an empty text."""
    guidance: float
    time: float
    next_time: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """Result of one step."""

    latents: Latents
    finished: Latents
    """Network's prediction of the finished image."""


class ImageModel(Protocol):
    """Model that paints images from a text. It keeps no state of an image."""

    dtype: np.dtype[np.floating[Any]]
    """Dtype of latents."""

    def encode(self, text: str, field: str) -> tuple[int, ...]:
        """Return the tokens of a text. Raises ContextTooLong, which names `field`."""

    def latents_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the shape of the latents of an image of this size."""

    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        """Compute one step of each image. All latents have the same shape."""

    def pixels(self, latents: Latents) -> Pixels:
        """Return the image of finished latents."""


def time_of(step: int, steps: int) -> float:
    """Return the time at the beginning of step number `step`."""
    return step / steps


def noise_of(seed: int, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Latents:
    """Return the initial latents of image `number` of a request with this seed.

    They are a function of the two numbers, by a counter-based generator.
    """
    drawn = np.random.Generator(np.random.Philox(key=[seed, number]))
    return drawn.standard_normal(shape).astype(dtype)
