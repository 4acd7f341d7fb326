"""Replacement of a decoder's linear layers by quantized layers while transformers reads weights.

Layers whose weights a folder stores as numbers of 8 or 4 bits keep these numbers. With
`quantization: int8`, all other layers are rounded. transformers calls the quantizer for each tensor
that it reads, so a layer's full weights are in memory only until they are rounded.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from shared.errors import ConfigError
from shared.vision.dequantize import StoredWeight
from shared.vision.weights import Quantization, renamer_of
from workers.engine.model.int8 import fill, quantized_layers
from workers.engine.model.quantized_linear import QuantizedLinear

METHOD = "pagemill"


@register_quantization_config(METHOD)
class QuantizedConfig(Quantization):
    """Setting with which transformers uses the quantizer."""

    def __init__(self, *, rounds: bool, keeps: bool) -> None:
        """Make the setting: `keeps` is whether layers keep the numbers of the folder."""
        super().__init__(METHOD, rounds=rounds)
        self.keeps = keeps


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """Replaces the layers of a decoder before transformers reads their weights."""

    quantization_config: QuantizedConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        layers = getattr(decoder, "layers", nn.ModuleList())
        if config.rounds:
            for module in layers.modules():
                if isinstance(module, nn.Conv1d):  # Part of a recurrent layer, which stays a float.
                    continue
                # transformers stores the experts of a layer, and so most weights, in one tensor.
                if any(weight.dim() > 2 for weight in module.parameters(recurse=False)):
                    _refuse(f"the experts of {model.config.model_type!r} are not linear layers")
            if not any(map(_is_linear, layers.modules())):
                _refuse(f"the layers of {model.config.model_type!r} are not linear layers of torch")
        if config.keeps:
            self._keep_layers(model, layers)
        if config.rounds:
            for name, module in list(layers.named_modules()):
                if _is_linear(module):
                    layers.set_submodule(name, QuantizedLinear(module))

    def _keep_layers(self, model: PreTrainedModel, layers: nn.Module) -> None:
        """Replace the layers whose numbers products can read, and keep these."""
        weights = self.quantization_config.weights
        rename = renamer_of(model, get_model_conversion_mapping(model))
        names = {module: name for name, module in model.named_modules()}
        linears = {names[m]: m for m in layers.modules() if _is_linear(m)}
        for stored_name, stored in list(weights.items()):
            owner = rename(stored_name).removesuffix(".weight")
            if owner not in linears or not isinstance(stored, StoredWeight):
                continue
            with torch.device("cpu"):  # transformers makes the model on the meta device.
                numbers = stored.keep()
            if numbers is None:
                continue
            model.set_submodule(owner, QuantizedLinear(linears[owner], numbers))
            for part, values in (("scale", numbers.scale), ("zero", numbers.zero)):
                if values is not None:
                    weights[f"{stored_name.removesuffix('.weight')}.{part}"] = values

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.quantization_config.weights = {}
        for name, layer in quantized_layers(model):
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
        layer = model.get_submodule(owner)
        return name == "weight" and isinstance(layer, QuantizedLinear) and layer.is_rounded

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize()

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Quantize(ConversionOps):
    """Fills a `QuantizedLinear` with the weights that transformers has read for it."""

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
                fill(layer, weight)
            else:  # transformers would turn an exception into a report without the shapes.
                layer.found_shape = weight.shape
            # Else transformers would fill the layer with random numbers.
            for buffer in ("weight", "scale"):
                getattr(layer, buffer)._is_hf_initialized = True
                missing_keys.discard(f"{owner}.{buffer}")
        return {}


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    # A subclass may compute something else.
    return type(module) is nn.Linear


def _refuse(reason: str) -> None:
    raise ConfigError(f"models.quantization: {reason}", field="models.quantization")
