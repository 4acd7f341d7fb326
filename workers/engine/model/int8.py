"""Weight-only int8: the linear layers of a decoder as integers, with one scale per output channel.

A weight of channel i is `weight[i] * scale[i]`, with integers from -127 to 127 around zero.
Embeddings, norms, biases, the head and vision towers keep their type, and so do activations and the
KV cache. transformers calls this module's quantizer for each tensor that it reads, so a layer's
full weights are in memory only until they are rounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from shared.errors import ConfigError

METHOD = "pagemill_int8"
LARGEST = 127

# torch's product of bfloat16 rows with int8 weights reads half the bytes of a product in bfloat16,
# but does not tile rows: with more rows it is slower than converting the weights. Its products in
# other types are not vectorised.
MAX_PACKED_ROWS = 16
# Number of inputs that its loops process at a time.
PACKED_STEP = 32
# Channels that are converted at a time, so that the result is in a cache when it is read.
CHUNK_CHANNELS = 1024
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


class Int8Linear(nn.Module):
    """A linear layer with int8 weights; the input and the output have the type of `scale`."""

    weight: Tensor  # [out_features, in_features] int8
    scale: Tensor  # [out_features]
    error = 0.0
    """Error of the weights relative to their norm."""
    found_shape: torch.Size | None = None
    """Shape of the weights that were read, if it is not the layer's."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Make a layer in the shape of `linear`, which may be on the meta device."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=torch.int8))
        scale = torch.empty(linear.out_features, dtype=dtype, device=linear.weight.device)
        self.register_buffer("scale", scale)

    def fill(self, weight: Tensor) -> None:
        """Round full weights and store them."""
        # The buffers may have been on the meta device.
        integers = torch.empty_like(weight, dtype=torch.int8)
        scale = torch.empty(len(weight), dtype=self.scale.dtype, device=weight.device)
        # Norms of the difference and of the weights, of each chunk.
        norms = []
        for first in range(0, len(weight), FILLED_CHANNELS):
            part = slice(first, first + FILLED_CHANNELS)
            exact = weight[part].float()
            integers[part], scale[part] = quantize(exact, scale.dtype)
            difference = exact - dequantize(integers[part], scale[part].float())
            norms.append(torch.stack([difference.norm(), exact.norm()]))
        difference_norm, norm = torch.stack(norms).double().norm(dim=0)
        self.error = float(difference_norm / norm.clamp_min(torch.finfo().tiny))
        self.weight, self.scale = integers, scale

    def forward(self, hidden: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        rows = hidden.reshape(-1, self.in_features)
        if _has_packed_product(rows):
            output: Tensor = torch.ops.aten._weight_int8pack_mm(
                rows.contiguous(), self.weight, self.scale
            )
        else:
            output = self._multiply_converted(rows)
        if self.bias is not None:
            output += self.bias
        return output.view(*hidden.shape[:-1], self.out_features)

    def _multiply_converted(self, rows: Tensor) -> Tensor:
        # The integers are exact in either type; scaling the sums rounds once less than scaling the
        # weights.
        step = CHUNK_CHANNELS if rows.device.type == "cpu" else self.out_features
        output = rows.new_empty(len(rows), self.out_features)
        for first in range(0, self.out_features, step):
            part = slice(first, first + step)
            output[:, part] = F.linear(rows, self.weight[part].to(rows.dtype))
        return output.mul_(self.scale)


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round weights [out, in] to int8; return them with the scale of each channel, in `dtype`.

    No element is off by more than half of its channel's scale.
    """
    exact = weight.float()
    # The integers are computed with the scale as it is stored, so its own rounding adds no error.
    tiny = torch.finfo(torch.float32).tiny
    scale = (exact.abs().amax(1) / LARGEST).to(dtype).clamp_min(tiny)
    rounded = (exact / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return rounded.to(torch.int8), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the rounded weights in the type of `scale`."""
    return weight.to(scale.dtype) * scale[:, None]


def int8_layers(model: nn.Module) -> Iterator[tuple[str, Int8Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            yield name, module


def report_on(model: nn.Module) -> Int8Report:
    """Describe a model that was loaded with an `Int8Config`, and write the report to the log."""
    layers = list(int8_layers(model))
    worst_layer, worst = max(layers, key=lambda layer: layer[1].error)
    report = Int8Report(
        len(layers),
        sum(layer.error for _, layer in layers) / len(layers),
        worst.error,
        worst_layer,
        sum(layer.weight.numel() * (layer.scale.itemsize - 1) for _, layer in layers),
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


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    """Setting with which transformers quantizes a model while it reads the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.quant_method: Any = METHOD
        self.dtype = dtype


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    """Replaces the layers of a decoder before transformers reads their weights."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        dtype = self.quantization_config.dtype  # type: ignore[attr-defined]
        layers = getattr(decoder, "layers", nn.ModuleList())
        for weight in layers.parameters():
            # transformers stores the experts of a layer, and so most weights, in one tensor.
            if weight.dim() > 2:
                _refuse(f"the experts of {model.config.model_type!r} are not linear layers")
        linears = [(n, module) for n, module in layers.named_modules() if type(module) is nn.Linear]
        if not linears:
            _refuse(f"the layers of {model.config.model_type!r} are not linear layers of torch")
        for name, linear in linears:
            layers.set_submodule(name, Int8Linear(linear, dtype))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name, layer in int8_layers(model):
            if layer.found_shape is not None:
                raise ConfigError(
                    f"models.path: {name}.weight has the shape {list(layer.found_shape)}, but"
                    f" config.json requires {list(layer.weight.shape)}",
                    field="models.path",
                )

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        owner, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(owner), Int8Linear)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize()

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Quantize(ConversionOps):
    """Fills an `Int8Linear` with the weights that transformers has read for it."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        model, missing_keys = kwargs["model"], kwargs["missing_keys"]
        for name, value in input_dict.items():
            owner = name.rpartition(".")[0]
            layer = model.get_submodule(owner)
            weight = value[0] if isinstance(value, list) else value
            if weight.shape == layer.weight.shape:
                layer.fill(weight)
            else:  # transformers would turn an exception into a report without the shapes.
                layer.found_shape = weight.shape
            # Else transformers would fill the layer with random numbers.
            for buffer in ("weight", "scale"):
                getattr(layer, buffer)._is_hf_initialized = True
                missing_keys.discard(f"{owner}.{buffer}")
        return {}


def _has_packed_product(rows: Tensor) -> bool:
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.bfloat16
        and len(rows) <= MAX_PACKED_ROWS
        and rows.shape[1] % PACKED_STEP == 0
    )


def _refuse(reason: str) -> None:
    raise ConfigError(f"models.quantization: {reason}", field="models.quantization")
