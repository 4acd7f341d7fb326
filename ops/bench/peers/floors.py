"""The least time that this machine can take for a workload: arithmetic only.

The floor counts matrix products and the reading of weights. Attention, sampling and all other work
are left out, so that no engine can be below it, unless its products of few rows are faster than
torch's, which were measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the machine, measured in the same run."""

    read_bytes_s: float
    gemm_flops_s: dict[int, float]
    """Operations per second of bfloat16 products, by number of rows."""

    def flops_s(self, num_rows: float) -> float:
        """Return the rate at the largest measured number of rows up to `num_rows`, or the first."""
        below = [rows for rows in self.gemm_flops_s if rows <= num_rows]
        return self.gemm_flops_s[max(below) if below else min(self.gemm_flops_s)]

    @property
    def peak_flops_s(self) -> float:
        return max(self.gemm_flops_s.values())

    def best(self, other: "Limits") -> "Limits":
        """Return the better of two measurements, because a disturbance can only make one worse."""
        rates = {
            rows: max(rate, other.gemm_flops_s[rows]) for rows, rate in self.gemm_flops_s.items()
        }
        return Limits(max(self.read_bytes_s, other.read_bytes_s), rates)


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a model, as far as they are in matrices that tokens are multiplied with."""

    layers: int
    """Parameters in all layers of the language model."""
    head: int
    """Parameters that are used only for sampled tokens."""
    vision_patch: int = 0
    """Parameters that a patch of an image is multiplied with in the vision tower."""
    patch_side: int = 0
    """Side of a patch in pixels; 0 for a model without vision."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """Read a config.json: a decoder of Llama's layout, or a Qwen2-VL."""
        text = config.get("text_config", config)
        hidden, num_heads = text["hidden_size"], text["num_attention_heads"]
        head_dim = text.get("head_dim") or hidden // num_heads
        attention = 2 * hidden * head_dim * (num_heads + text["num_key_value_heads"])
        layer = attention + 3 * hidden * text["intermediate_size"]
        head = hidden * text["vocab_size"]
        vision = config.get("vision_config")
        if vision is None:
            return cls(text["num_hidden_layers"] * layer, head)
        layers = text["num_hidden_layers"] * layer
        return cls(layers, head, _vision_patch(vision), vision["patch_size"])

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that a step of decoding has to read."""
        return WEIGHT_BYTES * (self.layers + self.head)


def _vision_patch(vision: Mapping[str, Any]) -> int:
    width = vision["embed_dim"]
    block = 4 * width**2 + 2 * int(vision["mlp_ratio"] * width) * width
    pixels = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    # The merger combines a square of patches.
    merged = vision["spatial_merge_size"] ** 2
    merger = (merged * width) ** 2 + merged * width * vision["hidden_size"]
    return int(vision["depth"] * block + pixels * width + merger // merged)


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a workload; first tokens of prompts count as cached where they may be."""

    num_requests: int
    max_tokens: int
    prefill_tokens: int
    image_pixels: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    flops: float
    read_bytes: float
    num_rows: float
    """Number of rows of the products."""

    def floor_s(self, limits: Limits) -> float:
        return max(
            self.read_bytes / limits.read_bytes_s, self.flops / limits.flops_s(self.num_rows)
        )


def prefill(shape: Shape, work: Work) -> Phase:
    num_patches = work.image_pixels / shape.patch_side**2 if work.image_pixels else 0.0
    products = work.prefill_tokens * shape.layers + work.num_requests * shape.head
    flops = 2.0 * (products + num_patches * shape.vision_patch)
    return Phase(flops, shape.weight_bytes, work.prefill_tokens)


def decode(shape: Shape, work: Work) -> Phase:
    """Return the seconds of all steps after the first token, with one token of each request."""
    num_steps = work.max_tokens - 1
    flops = 2.0 * (shape.layers + shape.head) * work.num_requests * num_steps
    return Phase(flops, float(shape.weight_bytes * num_steps), work.num_requests)


def floor_s(shape: Shape, work: Work, limits: Limits) -> float:
    return prefill(shape, work).floor_s(limits) + decode(shape, work).floor_s(limits)
