"""Reads LoRA adapters from folders in peft's format: `adapter_config.json` and safetensors.

Settings that would make the adapter's outputs differ from peft's are rejected, and so are unknown
settings, because new versions of peft add variants of LoRA as settings.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from shared.errors import ConfigError
from shared.helpers.validation import reason_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

Positive = Annotated[int, Meta(ge=1)]
Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Low-rank weights of one linear layer, which add b (a x) to its output."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank], multiplied by the scale


class _Config(Struct):
    """Supported settings of `adapter_config.json`."""

    peft_type: Literal["LORA"]
    r: Positive
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, Positive] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: str | list[str] | None = None
    bias: Literal["none"] = "none"
    # Other methods start from changed base weights, which the adapter's files do not contain.
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] | None = True

    def scale(self, module: str) -> float:
        """Return the factor of `b`. Patterns match ends of module names; the first match wins."""
        alpha = _look_up(self.alpha_pattern, module, self.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        return _look_up(self.rank_pattern, module, self.r)

    def targets(self, module: str) -> bool:
        match self.target_modules:
            case None | "all-linear":
                return True
            case str(pattern):
                return re.fullmatch(pattern, module) is not None
            case names:
                return any(f".{module}".endswith(f".{name}") for name in names)


# Settings of training, and the choice of layers, which the names of the weights contain as well.
_IRRELEVANT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}


def read_adapter(
    name: str, folder: Path, model: PreTrainedModel, tower: Sequence[str]
) -> dict[str, LoraWeights]:
    """Return the adapter's weights by name of linear layer, in the model's dtype, on its device.

    `tower` lists the submodules of the vision tower. Raises ConfigError.
    """
    try:
        return dict(_read(folder, model, tower))
    except ConfigError as error:
        field = f"models.adapters.{name}"
        raise ConfigError(f"{field}: {folder}: {error.message}", field=field) from error


def _read(
    folder: Path, model: PreTrainedModel, tower: Sequence[str]
) -> Iterator[tuple[str, LoraWeights]]:
    config = _read_config(folder / CONFIG)
    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    for saved_name, pair in _read_pairs(folder / WEIGHTS).items():
        if not config.targets(saved_name):
            _refuse(f"{WEIGHTS} has {saved_name}, which is not in {CONFIG}'s target_modules")
        # transformers maps names of modules that have changed since the adapter was trained.
        module = rename_source_key(f"{saved_name}.weight", renamings, [])[0].removesuffix(".weight")
        linear = _find_linear(model, module, tower)
        rank = config.rank(saved_name)
        a = _check_weight(pair, f"{saved_name}.lora_A", (rank, linear.in_features))
        b = _check_weight(pair, f"{saved_name}.lora_B", (linear.out_features, rank))
        scaled = b.double() * config.scale(saved_name)
        yield (
            module,
            LoraWeights(a.to(model.device, model.dtype), scaled.to(model.device, model.dtype)),
        )


def _read_config(file: Path) -> _Config:
    try:
        tree = json.loads(file.read_bytes())
        config = msgspec.convert(tree, _Config)
        for pattern in (*(config.rank_pattern or ()), *(config.alpha_pattern or ())):
            re.compile(pattern)
        if isinstance(config.target_modules, str):
            re.compile(config.target_modules)
    except (msgspec.ValidationError, OSError, ValueError, RecursionError) as error:
        _refuse(f"{CONFIG}: {reason_of(error)}")
    except re.error as error:
        _refuse(f"{CONFIG}: {error.pattern!r} is not a regular expression: {error}")
    known_keys = {*_Config.__struct_fields__, *_IRRELEVANT}
    for key in sorted(tree.keys() - known_keys):
        if tree[key]:
            _refuse(f"{CONFIG}: {key} is {tree[key]!r}; the engine serves plain LoRA only")
    return config


def _read_pairs(file: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors by module, then by `<module>.lora_A` or `<module>.lora_B`."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        _refuse(f"{WEIGHTS}: {error}")
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        match = _KEY.fullmatch(key)
        if match is None:
            _refuse(f"{WEIGHTS}: {key}: only low-rank weights of linear layers are served")
        module, matrix = match.groups()
        pairs.setdefault(module, {})[f"{module}.lora_{matrix}"] = tensor
    if not pairs:
        _refuse(f"{WEIGHTS} is empty")
    return pairs


def _find_linear(model: PreTrainedModel, module: str, tower: Sequence[str]) -> nn.Linear:
    if module.startswith(tuple(f"{part}." for part in tower)):
        _refuse(f"{module} is in the vision tower, whose embeddings all adapters share")
    if ".experts." in module:
        _refuse(f"{module} is in an expert, and only layers that see every token can be adapted")
    try:
        linear = model.get_submodule(module)
    except AttributeError:
        _refuse(f"the model has no module {module}")
    if linear is model.get_output_embeddings():  # type: ignore[no-untyped-call]
        _refuse(f"{module} is the model's head, which cannot be adapted here")
    if not isinstance(linear, nn.Linear):
        _refuse(f"{module} is a {type(linear).__name__}; only linear layers can be adapted")
    return linear


def _check_weight(pair: Mapping[str, Tensor], key: str, shape: tuple[int, int]) -> Tensor:
    tensor = pair.get(key)
    if tensor is None:
        _refuse(f"{WEIGHTS} has no {key}")
    # Floats of 8 bits represent other values, by a scale.
    is_float = tensor.is_floating_point() and tensor.itemsize > 1
    if not is_float or tuple(tensor.shape) != shape:
        _refuse(f"{key} is {tensor.dtype} {list(tensor.shape)}; expected {list(shape)}")
    if not bool(tensor.isfinite().all()):
        _refuse(f"{key} holds values that are not finite")
    return tensor


def _look_up(patterns: Mapping[str, Value] | None, module: str, default: Value) -> Value:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)
