"""Pixels of decoded images."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.errors import WorkerFailure
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


def to_unit(decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values from 0 to 1 for a decoder's values from -1 to 1, of the same shape.

    `dtype` is the type of the network that painted the image. Raises WorkerFailure for values that
    are not finite, which diffusers paints black.
    """
    if not bool(decoded.isfinite().all()):
        raise WorkerFailure(
            f"the image has values that are not finite: the networks overflow in {dtype}"
        )
    return (decoded * 0.5 + 0.5).clamp(0, 1)


def to_pixels(image: Tensor) -> Pixels:
    """Return 8-bit pixels, [..., 3], of values from 0 to 1, [3, ...]."""
    values = image.movedim(0, -1).cpu().float().numpy()
    return np.asarray((values * 255).round(), np.uint8)
