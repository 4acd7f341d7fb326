"""Pixels of decoded images."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.errors import NumberOverflow
from workers.generator.core.denoising import Pixels, Size

MAX_WHOLE_PIXELS = 2**21
"""Images with more pixels are decoded in tiles, because memory grows with the pixels."""


def decode_latents(vae: Any, latents: Tensor, size: Size) -> Tensor:
    """Return what the decoder of a VAE makes of a batch of latents, from -1 to 1.

    A large image equals one of a pipeline of diffusers after `enable_tiling`.
    """
    width, height = size
    if width * height > MAX_WHOLE_PIXELS:
        vae.enable_tiling()
    else:
        vae.disable_tiling()
    decoded: Tensor = vae.decode(latents, return_dict=False)[0]
    return decoded


def denormalized(latents: Tensor, config: Any) -> Tensor:
    """Return latents, [1, channels, frames, rows, columns], in the scale of a VAE.

    `config` has their mean and standard deviation for each channel.
    """
    # The order of the operations is the pipelines', or the last bits would differ.
    inverse = 1.0 / _per_channel(config.latents_std, latents)
    return latents / inverse + _per_channel(config.latents_mean, latents)


def normalized(latents: Tensor, config: Any) -> Tensor:
    """Return latents in the scale of a transformer; the inverse of `denormalized`."""
    centered = latents - _per_channel(config.latents_mean, latents)
    return centered / _per_channel(config.latents_std, latents)


def _per_channel(values: Sequence[float], latents: Tensor) -> Tensor:
    return torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)


def to_unit(decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values from 0 to 1 for a decoder's values from -1 to 1, of the same shape.

    `dtype` is the type of the network that painted the image. Raises NumberOverflow for values that
    are not finite, which diffusers paints black.
    """
    if not bool(decoded.isfinite().all()):
        name = str(dtype).removeprefix("torch.")
        raise NumberOverflow(
            f"the model has computed values that are not finite, an overflow in {name}: with the"
            " same parameters it would again"
        )
    return (decoded * 0.5 + 0.5).clamp(0, 1)


def to_pixels(image: Tensor) -> Pixels:
    """Return 8-bit pixels, [..., 3], of values from 0 to 1, [3, ...]."""
    values = image.movedim(0, -1).cpu().float().numpy()
    return np.asarray((values * 255).round(), np.uint8)
