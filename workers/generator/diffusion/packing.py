"""Packed latents: [patches, channels], where a patch is 2x2 latents."""

import torch
from torch import Tensor

from workers.generator.core.denoising import Noise

PATCH = 2
"""Side of a patch in latents."""


def pack(noise: Noise | Tensor, rows: int, columns: int) -> Tensor:
    """Return noise or latents of [channels, 2 * rows, 2 * columns] as [patches, 4 * channels]."""
    patches = torch.as_tensor(noise).view(-1, rows, PATCH, columns, PATCH)
    return patches.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return latents of [patches, 4 * channels] as [channels, 2 * rows, 2 * columns]."""
    patches = packed.view(rows, columns, -1, PATCH, PATCH)
    return patches.permute(2, 0, 3, 1, 4).reshape(-1, PATCH * rows, PATCH * columns)
