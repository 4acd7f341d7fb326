"""Loading of weights from a folder in Hugging Face format, for a whole model or a part of it.

Weights are read only from safetensors files; code in the folder is never executed.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import QuantizationConfigMixin

from shared.errors import ConfigError
from shared.vision.dequantize import open_weights
from shared.vision.formats import Contradiction
from shared.vision.quantized import (
    SETTINGS,
    Quantized,
    find_quantized_tensor,
    read_quantized,
    read_shapes,
)
from shared.vision.rank_plan import Share
from shared.vision.rank_weights import RankShare


class Quantization(QuantizationConfigMixin):
    """Setting of a quantizer of transformers, which replaces layers before their weights are read.

    It is used if it `rounds` full weights, or if the folder has quantized weights.
    """

    weights: dict[str, Any]
    """Weights of the folder by name, if it has quantized ones. Until they are read, a quantizer
    may add entries, and may keep the numbers of a `StoredWeight`."""

    def __init__(self, method: str, *, rounds: bool) -> None:
        self.quant_method: Any = method
        self.rounds = rounds
        self.weights = {}

    # transformers copies the settings of a model, but open files cannot be copied.
    def __deepcopy__(self, memo: object) -> "Quantization":
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "rounds": self.rounds}


def load_weights(
    model_class: Any,
    folder: Path,
    dtype: torch.dtype,
    device: str,
    without: Sequence[str] = (),
    quantization: Quantization | None = None,
    part: tuple[str, PreTrainedConfig] | None = None,
    share: Share | None = None,
) -> PreTrainedModel:
    """Load a model for inference. Raises ConfigError.

    `without` names submodules that become None, and their weights are not read. `quantization` is
    applied to each tensor as it is read. To load a part of a model, `part` has the prefix of its
    weights and its config. Weights that the folder has in a quantized format get their values,
    unless `quantization` keeps their numbers. With a `share`, only this rank's part of the weights
    is read; the folder must have floats. Each tensor is copied to the device when it is read, so
    the memory of the host never has the whole model of another device.
    """
    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    quantized = read_quantized(folder)
    if quantization is not None and (quantization.rounds or quantized is not None):
        # A None would override the setting in config.json.
        options["quantization_config"] = quantization
    if part is not None:
        prefix, config = part
        options |= {"config": config, "key_mapping": {rf"^{re.escape(prefix)}\.": ""}}
    if dtype == torch.float64:
        # The products of stacked experts exist only for smaller types.
        options["experts_implementation"] = "eager"
    disable_progress_bar()  # type: ignore[no-untyped-call]
    whole = _describe(model_class, folder, without, part)
    _check_size(whole, folder)
    rank = None if share is None else RankShare(whole, share)
    if quantized is not None or rank is not None:
        options["config"] = _without_quantization(folder, options.get("config"))
        if model_class is AutoModelForCausalLM:  # It cannot load weights without a folder.
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
    try:
        model, report = _part_of(model_class, without, part is not None, rank).from_pretrained(
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **(options | _open_source(folder, quantized, dtype, quantization, rank)),
        )
    except (OSError, ValueError, SafetensorError, Contradiction) as error:
        raise ConfigError(f"models.path: {folder}: {error}", field="models.path") from error
    # The conversions that were used for this model; transformers has no public name for them.
    rename = renamer_of(model, model._weight_conversions)
    _refuse(folder, find_quantized_tensor(folder, model, rename, quantized))
    _refuse(folder, _find_fault(report))
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    if rank is not None:
        rank.finish(loaded)
    return loaded


def _find_fault(report: Mapping[str, Any]) -> str | None:
    """Return the reason to refuse a model that transformers has loaded.

    It fills weights that are missing, or have another shape, with random numbers.
    """
    for name, shape, required in sorted(report["mismatched_keys"]):
        return f"has {name} of shape {list(shape)}, but config.json requires {list(required)}"
    if missing := sorted(report["missing_keys"]):
        return f"lacks weights: {', '.join(missing[:3])}"
    return None


def _describe(
    model_class: Any,
    folder: Path,
    without: Sequence[str],
    part: tuple[str, PreTrainedConfig] | None,
) -> PreTrainedModel:
    """Return the model that config.json describes, on the device "meta"."""
    is_auto = model_class is AutoModelForCausalLM
    kind = AutoConfig if is_auto else model_class.config_class
    config = kind.from_pretrained(folder, local_files_only=True) if part is None else part[1]
    config = _without_quantization(folder, config)
    with torch.device("meta"):
        if is_auto:
            model: PreTrainedModel = model_class.from_config(config)
        else:
            model = _part_of(model_class, without, part is not None)(config)
    return model


def _check_size(model: PreTrainedModel, folder: Path) -> None:
    """Raise ConfigError if config.json describes more than twice the parameters of the files.

    transformers would fill most of them with random numbers before it reports them, which may take
    all memory: sizes that are missing in config.json have the defaults of a large model.
    """
    tied = model.all_tied_weights_keys
    described = sum(p.numel() for name, p in model.named_parameters() if name not in tied)
    stored = sum(math.prod(shape) for _, shape in read_shapes(folder))
    if described > 2 * stored:
        raise ConfigError(
            f"models.path: {folder}: config.json describes {described} parameters, and the files"
            f" have {stored}: they lack weights, or config.json lacks sizes",
            field="models.path",
        )


def _open_source(
    folder: Path,
    quantized: Quantized | None,
    dtype: torch.dtype,
    quantization: Quantization | None,
    rank: RankShare | None,
) -> dict[str, Any]:
    """Return the options with which transformers reads the weights of a folder."""
    if rank is not None:
        weights = rank.open_weights(folder)
    elif quantized is None:
        return {"pretrained_model_name_or_path": folder}
    else:
        weights = open_weights(folder, quantized, dtype)
        if quantization is not None:
            quantization.weights = weights
    return {"pretrained_model_name_or_path": None, "state_dict": weights}


def _without_quantization(folder: Path, config: PreTrainedConfig | None) -> PreTrainedConfig:
    """Return the config without the settings for which transformers needs other packages."""
    config = copy.deepcopy(config or AutoConfig.from_pretrained(folder, local_files_only=True))
    for section in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for setting in SETTINGS:
            getattr(section, "__dict__", {}).pop(setting, None)
    return config


def renamer_of(model: Any, conversions: Sequence[Any]) -> Callable[[str], str]:
    """Return the function that transformers applies to the names of the tensors in the files.

    It changes the names of older checkpoints, and joins the experts of a layer.
    """
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state = model.state_dict()

    def rename(name: str) -> str:
        prefix = model.base_model_prefix
        renamed, _ = rename_source_key(name, renamings, converters, prefix, state)
        if renamed in state or name not in state:
            return renamed
        return name

    return rename


def _refuse(folder: Path, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(f"models.path: {folder} {reason}", field="models.path")


def _part_of(
    model_class: Any, without: Sequence[str], is_part: bool, rank: RankShare | None = None
) -> Any:
    """Return a class that builds the model and drops parts of it before they use memory.

    If the model itself is a part, the weights of other parts are ignored.
    """
    if rank is not None:
        without = [*without, *rank.absent_modules()]
    elif not (without or is_part):
        return model_class

    def init(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        for name in without:
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, None)
        if rank is not None:
            rank.shrink(self)
        parameters = dict(self.named_parameters(remove_duplicate=False))
        self.all_tied_weights_keys = {
            name: source
            for name, source in self.all_tied_weights_keys.items()
            if name in parameters
        }

    # transformers looks up the weight names of older files by the name and module of the class.
    return type(
        model_class.__name__,
        (model_class,),
        {
            "__init__": init,
            "__module__": model_class.__module__,
            "_keys_to_ignore_on_load_unexpected": [r""]
            if is_part
            else [rf"^{re.escape(name)}\." for name in without],
        },
    )
