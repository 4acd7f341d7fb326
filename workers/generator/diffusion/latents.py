"""Methods that models share by the form of their latents."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from workers.generator.core.denoising import Condition, Noise, Pixels, Progress, Size
from workers.generator.diffusion import autoencoder_kl
from workers.generator.diffusion.packing import PATCH, pack
from workers.generator.diffusion.pixels import to_pixels, to_unit

MAX_PATCHES = 16_384
"""Limit on the patches of an image: 2048x2048 pixels of the published models. One image must not
take all the memory."""


class DiffusersModel(ABC):
    """Model that encodes each text alone, and decodes latents to values from 0 to 1."""

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> list[Condition]:
        return [self._encode(text) for text in texts]

    def pixels(self, latents: TensorData, size: Size) -> Pixels:
        return to_pixels(self.decode(latents, size))

    @abstractmethod
    def _encode(self, text: str) -> Condition: ...

    @abstractmethod
    def decode(self, latents: TensorData, size: Size) -> Tensor:
        """Return the image of finished latents, [3, height, width], with values from 0 to 1.

        A video has the shape [3, frames, height, width]. Raises NumberOverflow for values that are
        not finite.
        """


class SpatialLatents(DiffusersModel):
    """Model with latents [channels, rows, columns] and `AutoencoderKL`."""

    def __init__(self, transformer: Any, vae: Any) -> None:
        self._transformer, self._vae = transformer, vae
        self._scale = autoencoder_kl.scale_of(vae)

    def noise_shape(self, size: Size) -> tuple[int, int, int]:
        width, height = size
        return self._transformer.config.in_channels, height // self._scale, width // self._scale

    @torch.inference_mode()
    def decode(self, latents: TensorData, size: Size) -> Tensor:
        decoded = autoencoder_kl.decode(self._vae, to_torch(latents), size)
        return to_unit(decoded, self._transformer.dtype)


class PackedLatents(DiffusersModel):
    """Model with packed latents [patches, channels], where a patch is 2x2 latents."""

    def __init__(self, transformer: Any, vae: Any, multiple: int) -> None:
        """`multiple` is the side of a patch in pixels."""
        self._transformer, self._vae, self._multiple = transformer, vae, multiple

    def noise_shape(self, size: Size) -> tuple[int, int, int]:
        channels = self._transformer.config.in_channels // PATCH**2
        rows, columns = self._grid(size)
        return channels, PATCH * rows, PATCH * columns

    def begin(self, size: Size, noise: Noise) -> Progress:
        packed = pack(noise, *self._grid(size))
        return Progress(from_torch(packed.to(self._transformer.dtype)), {})

    def _grid(self, size: Size) -> tuple[int, int]:
        """Return the number of rows and columns of patches."""
        width, height = size
        return height // self._multiple, width // self._multiple
