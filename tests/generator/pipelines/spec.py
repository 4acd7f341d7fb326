"""What the tests of all pipelines of diffusers need of one of them."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from shared.protocol.images import PaintParams

Request = tuple[str, PaintParams]
"""A prompt and the parameters of its image."""


SIZES = ("48x48", "96x48", "48x96")
BAD_SIZES = (
    ("56x48", "56x48: width and height must be multiples of 16"),
    ("8192x8192", "8192x8192: 262144 patches are over the limit of 16384"),
)
"""Sizes that networks with patches of 16 pixels refuse, and the reasons."""


class PaintWhole(Protocol):
    """Function that paints by diffusers' own pipeline, of our noise."""

    def __call__(
        self,
        prompt: str,
        params: PaintParams,
        number: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Any:
        """Return pixels from 0 to 1, [height, width, 3], of a video [frames, height, width, 3]."""


class Write(Protocol):
    """Function that writes the folder of the pipeline, by diffusers."""

    def __call__(self, folder: Path) -> None: ...


class PipelineSpec(NamedTuple):
    """A pipeline with random weights, and its requests.

    Means, standard deviations and shifts in its configs differ from 0 and 1.
    """

    name: str
    """Name of the module with its computation."""
    write: Write
    paint_whole: PaintWhole
    sizes: Sequence[str]
    requests: Sequence[Request]
    """The first one has 4 steps, a prompt, a guidance, a seed, and a negative prompt if the model
    has them."""
    settings: Sequence[tuple[str, str, Any]]
    """A file, a key and a value that changes images, for settings that no other test covers."""
    max_tokens: int
    """Most tokens of a text, with those around it."""
    bad_sizes: Sequence[tuple[str, str]]
    """Sizes that are refused, and the reasons."""
    cuts_texts: bool = True
    """Whether the pipeline silently cuts a text that is too long."""
    refused: Sequence[tuple[str, str, Any, str]] = ()
    """A file, a key and a value that is refused, and a part of the message."""
    latents_dtype: str | None = None
    """Dtype of latents between steps; None for the dtype of the networks."""
    batch_difference: float = 0.0
    """Largest difference in float64 that other images of a batch make. A product of one row may
    have other last bits than the same row in a larger product. Before each step they are rounded
    away, because latents get float32, but not after the last one."""
    layers: tuple[str, str] = ("num_layers", "lacks weights: transformer_blocks.2.")
    """Setting with the number of the transformer's layers, 2, and words of the refusal of 3."""


def to_file(pixels: Any) -> Any:
    """Return the 8-bit pixels that a pipeline writes, in the shape of `pixels`."""
    return (pixels.astype(np.float32) * 255).round().astype(np.uint8)


def read_png(file: bytes) -> Any:
    """Return the pixels of a PNG file, [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(file)))
