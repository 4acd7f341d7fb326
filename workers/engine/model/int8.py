"""Weight-only int8: the linear layers of a decoder as integers, with one scale per output channel.

A weight of channel i is `weight[i] * scale[i]`, with integers from -127 to 127 around zero.
Embeddings, norms, biases, the head and vision towers keep their type, and so do activations and the
KV cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.engine.model.quantized_linear import QuantizedLinear

LARGEST = 127

# Channels that are rounded at a time. Their float32 copies are small compared with a whole weight,
# which is the memory that a load is planned with.
FILLED_CHANNELS = 64


@dataclass(frozen=True, slots=True)
class Int8Report:
    """Errors of a model's int8 weights, compared with the original weights."""

    num_layers: int
    mean_error: float
    """Mean over the layers of |W - Q| / |W|, where Q are the rounded weights."""
    worst_error: float
    worst_layer: str
    saved_bytes: int
    """Memory that the weights would need in addition, in the type of the activations."""


def fill(layer: QuantizedLinear, weight: Tensor) -> None:
    """Round full weights and store them in a layer."""
    # The buffers may have been on the meta device.
    integers = torch.empty_like(weight, dtype=torch.int8)
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    # Norms of the difference and of the weights, of each chunk.
    norms = []
    for first in range(0, len(weight), FILLED_CHANNELS):
        part = slice(first, first + FILLED_CHANNELS)
        exact = weight[part].float()
        integers[part], scale[part] = quantize(exact)
        difference = exact - dequantize(integers[part], scale[part])
        norms.append(torch.stack([difference.norm(), exact.norm()]))
    difference_norm, norm = torch.stack(norms).double().norm(dim=0)
    layer.error = float(difference_norm / norm.clamp_min(torch.finfo().tiny))
    layer.weight, layer.scale = integers, scale


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights [out, in] to int8; return them with the scale [out, 1] of each channel.

    No element is off by more than half of its channel's scale.
    """
    exact = weight.float()
    tiny = torch.finfo(torch.float32).tiny
    scale = (exact.abs().amax(1, keepdim=True) / LARGEST).clamp_min(tiny)
    rounded = (exact / scale).round_().clamp_(-LARGEST, LARGEST)
    return rounded.to(torch.int8), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the rounded weights in the type of `scale`."""
    return weight.to(scale.dtype) * scale


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def report_on(model: PreTrainedModel) -> Int8Report | None:
    """Describe the rounded layers of a model, and write the report to the log; None without any."""
    layers = [(name, layer) for name, layer in quantized_layers(model) if layer.is_rounded]
    if not layers:
        return None
    worst_layer, worst = max(layers, key=lambda layer: layer[1].error)
    report = Int8Report(
        len(layers),
        sum(layer.error for _, layer in layers) / len(layers),
        worst.error,
        worst_layer,
        sum(layer.weight.numel() * (model.dtype.itemsize - 1) for _, layer in layers),
    )
    structlog.get_logger().info(
        "weights_quantized",
        quantization="int8",
        num_layers=report.num_layers,
        mean_weight_error=round(report.mean_error, 5),
        worst_weight_error=round(report.worst_error, 5),
        worst_layer=report.worst_layer,
        saved_mib=report.saved_bytes >> 20,
    )
    return report
