"""Decoding by `AutoencoderKL`, the VAE of several pipelines."""

from typing import Any

from torch import Tensor


def scale_of(vae: Any) -> int:
    """Return the factor between the sides of an image and the sides of its latents."""
    return 1 << (len(vae.config.block_out_channels) - 1)


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Return the image of latents, [channels, rows, columns], as values from -1 to 1.

    The image is [3, height, width], in the dtype of the VAE.
    """
    config = vae.config
    # The order of the operations is the pipelines', or the last bits would differ.
    image = latents[None].to(vae.device, vae.dtype) / config.scaling_factor
    if config.shift_factor is not None:
        image = image + config.shift_factor
    decoded: Tensor = vae.decode(image, return_dict=False)[0][0]
    return decoded
