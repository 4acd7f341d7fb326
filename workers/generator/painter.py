"""Diffusion transformer that paints small images from the tokens of a text.

Patches of the noisy image and the tokens share one sequence. The time modulates every layer by one
shared network and a separate table for each layer. The network predicts the finished image.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 3
HEAD_WIDTH = 32
TIME_FEATURES = 64
PLACE_OCTAVES = 5
PLACE_FEATURES = 4 * PLACE_OCTAVES + 2


@dataclass(frozen=True, slots=True)
class PainterShape:
    """Sizes of the network."""

    width: int
    depth: int
    patch: int
    """Side of a patch in pixels."""
    num_tokens: int
    """Size of the vocabulary."""
    max_text: int
    """Number of tokens of every text: shorter texts are padded, longer texts do not fit."""


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // HEAD_WIDTH
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.table = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        scale_a, shift_a, gate_a, scale_b, shift_b, gate_b = (modulation + self.table).unbind(1)
        normal = F.layer_norm(hidden, (width,)) * (1 + scale_a[:, None]) + shift_a[:, None]
        heads = self.qkv(normal).view(rows, length, 3, self.num_heads, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = F.rms_norm(query, (HEAD_WIDTH,)), F.rms_norm(key, (HEAD_WIDTH,))
        mixed = F.scaled_dot_product_attention(query, key, value)
        hidden = hidden + gate_a[:, None] * self.out(mixed.transpose(1, 2).flatten(2))
        normal = F.layer_norm(hidden, (width,)) * (1 + scale_b[:, None]) + shift_b[:, None]
        added: Tensor = gate_b[:, None] * self.down(F.gelu(self.up(normal)))
        return hidden + added


class Painter(nn.Module):
    """Network that predicts the patches of an image from noisy patches, their time and a text."""

    def __init__(self, shape: PainterShape) -> None:
        super().__init__()
        width, values = shape.width, CHANNELS * shape.patch**2
        self.shape = shape
        self.text = nn.Embedding(shape.num_tokens, width)
        self.text_place = nn.Parameter(torch.randn(shape.max_text, width) * 0.02)
        self.patch_in, self.patch_out = nn.Linear(values, width), nn.Linear(width, values)
        self.place = nn.Linear(PLACE_FEATURES, width)
        self.time_in = nn.Linear(TIME_FEATURES, width)
        self.time_out = nn.Linear(width, 6 * width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(shape.depth))

    def forward(self, patches: Tensor, times: Tensor, text: Tensor, places: Tensor) -> Tensor:
        """Return the finished patches, [rows, patches, values].

        `times` are from 0, noise, to 1, the image. `text` has `max_text` tokens a row. `places`
        are the features of the patches' positions from `places_of`.
        """
        width = self.shape.width
        modulation = self.time_out(F.silu(self.time_in(_waves(times)))).view(-1, 6, width)
        words = self.text(text) + self.text_place
        hidden = torch.cat([words, self.patch_in(patches) + self.place(places)], 1)
        for layer in self.layers:
            hidden = layer(hidden, modulation)
        painted: Tensor = self.patch_out(F.layer_norm(hidden[:, text.shape[1] :], (width,)))
        return painted


def _waves(times: Tensor) -> Tensor:
    octaves = torch.linspace(0, math.log(1000), TIME_FEATURES // 2, dtype=torch.float64)
    angles = octaves.exp().to(times.dtype) * times[:, None]
    return torch.cat([angles.sin(), angles.cos()], 1)


def places_of(rows: int, columns: int) -> Tensor:
    """Return the features of the position of each patch, in float64, [patches, features]."""
    grid = [
        (torch.arange(count, dtype=torch.float64) + 0.5) / count * 2 - 1
        for count in (rows, columns)
    ]
    v, u = (axis.flatten() for axis in torch.meshgrid(*grid, indexing="ij"))
    scales = math.pi * 2.0 ** torch.arange(-1, PLACE_OCTAVES - 1, dtype=torch.float64)
    angles = torch.cat([u[:, None] * scales, v[:, None] * scales], 1)
    sides = torch.tensor([rows / 8, columns / 8], dtype=torch.float64).expand(len(u), 2)
    return torch.cat([angles.sin(), angles.cos(), sides], 1)


def to_patches(images: Tensor, patch: int) -> Tensor:
    """Convert [n, 3, height, width] to [n, patches, values]."""
    count, _, height, width = images.shape
    cut = images.view(count, CHANNELS, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, CHANNELS * patch**2)


def to_images(patches: Tensor, patch: int, rows: int) -> Tensor:
    """Convert [n, patches, values] to [n, 3, height, width]; the inverse of `to_patches`."""
    count = len(patches)
    grid = patches.view(count, rows, -1, CHANNELS, patch, patch)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(count, CHANNELS, rows * patch, -1)
