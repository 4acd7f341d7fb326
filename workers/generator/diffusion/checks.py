"""Checks of a diffusers folder before any weight is loaded: its settings and the shapes of weights.

The rule for a setting comes from its default in the class of the part. A number stays a number of
the same sign, and a list a list of such numbers. A network without memory for its weights then has
the shapes that the files must have.
"""

import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import diffusers
import torch
import transformers
from diffusers import ModelMixin
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from shared.errors import ConfigError
from shared.models.image_family import Component
from shared.models.image_folder import TOKENIZER_CONFIG, ImageFolder
from shared.vision.weight_files import read_header
from shared.vision.weights import renamer_of
from workers.generator.diffusion.parts import refusing

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
PROCESSOR_CONFIG = "preprocessor_config.json"
MAX_NUMBER = 2**31 - 1
FROM_ZERO = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
MAX_LAYERS = 1000
"""Limit on numbers of layers, because each takes time before the weights are read."""


class Fault(NamedTuple):
    """A setting that no model of its class has."""

    name: str
    value: Any
    rule: str
    """Words for the values that are possible."""


def check_folder(folder: ImageFolder) -> None:
    """Raise ConfigError for a setting or a weight that does not fit the classes of a folder."""
    for name, component in folder.components.items():
        part = folder.folder / name
        with refusing(part):
            values = json.loads((part / component.config).read_bytes())
            part_class = getattr(LIBRARIES[folder.settings[name][0]], component.class_name)
            faults = find_faults(values, _defaults_of(part_class, component, values))
            missing = (
                Fault(setting, values.get(setting), "a number")
                for owner, setting in folder.family.required
                if owner == name and values.get(setting) is None
            )
            for fault in (*faults, *missing):
                raise ConfigError(
                    f"models.path: {part / component.config}: {fault.name} of"
                    f" {json.dumps(fault.value)} must be {fault.rule}",
                    field="models.path",
                )
            if component.weights is not None:
                _check_shapes(folder, name, part_class, values)


def _defaults_of(
    part_class: Any, component: Component, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the defaults of a part's settings; nested ones for the parts of a network.

    A number that is null by default has another one in its place, if the file has a value for it.
    """
    if component.config == TOKENIZER_CONFIG:
        return {}
    if component.config == PROCESSOR_CONFIG:
        # transformers has a class without torchvision for each of them.
        processor_class = getattr(transformers, f"{component.config_class}Pil")
        return {name: getattr(processor_class, name, None) for name in values}
    if issubclass(part_class, PreTrainedModel):
        config = part_class.config_class()
        nested: dict[str, Any] = {
            name: getattr(config, name).to_dict() for name in config.sub_configs
        }
        # Older files have the settings of the language model without a section for them.
        return {**nested.get("text_config", {}), **config.to_dict(), **nested}
    defaults: dict[str, Any] = {}
    for name, parameter in inspect.signature(part_class.__init__).parameters.items():
        kinds = get_args(parameter.annotation) or (parameter.annotation,)
        number = next((kind for kind in (float, int) if kind in kinds), None)
        if parameter.default is None and values.get(name) is not None and number is not None:
            defaults[name] = number(-1)
        elif parameter.default is not inspect.Parameter.empty:
            defaults[name] = parameter.default
    return defaults


def find_faults(
    values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> Iterator[Fault]:
    """Yield the settings that do not follow the rule of their defaults."""
    for key, value in values.items():
        default, name = defaults.get(key), f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(default, dict | None):
            yield from find_faults(value, default or {}, f"{name}.")
        elif prefix and default is None and _has_numbers(value):
            # Sections of a position, which the network adds up.
            if (rule := _rule_for(key, value, [1])) is not None:
                yield Fault(name, value, rule)
        elif (rule := _rule_for(key, value, default)) is not None:
            yield Fault(name, value, rule)


def _has_numbers(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, int | float) for item in value)


def _rule_for(key: str, value: Any, default: Any) -> str | None:
    """Return the rule that a value does not follow; None if it follows the rule."""
    if isinstance(default, list | tuple) and default:
        if not isinstance(value, list) or not value:
            return "a list"
        # A list with a negative number may have any.
        sample = default[0] if isinstance(default[0], str) else min(default)
        rules = (_rule_for(key, item, sample) for item in value)
        rule = next((rule for rule in rules if rule is not None), None)
        return None if rule is None else f"a list of items, each {rule}"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return _rule_for_number(key, value, default)
    # Other settings have no type here. No class can compute with these numbers.
    items = value if isinstance(value, list) else [value]
    is_usable = all(not isinstance(item, float) or math.isfinite(item) for item in items)
    return None if is_usable else "finite"


def _rule_for_number(key: str, value: Any, default: float) -> str | None:
    is_whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return "a whole number" if is_whole else "a number"
    if math.isinf(value) and value != default:
        return "finite"
    if is_whole and value != int(value):
        return "a whole number"
    if abs(value) > MAX_NUMBER and value != default:
        return f"at most {MAX_NUMBER}"
    if "layers" in key and value > MAX_LAYERS:
        return f"at most {MAX_LAYERS}"
    # Ids of tokens, and shares that are left out in training, begin at 0.
    may_be_zero = default == 0 or key in FROM_ZERO or "dropout" in key
    if default >= 0 and not (value > 0 or (may_be_zero and value == 0)):
        return "at least 0" if may_be_zero else "more than 0"
    return None


def _check_shapes(
    folder: ImageFolder, name: str, part_class: Any, settings: Mapping[str, Any]
) -> None:
    """Raise ConfigError for a weight of another shape than the settings require."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    with torch.device("meta"):
        if issubclass(part_class, ModelMixin):
            network = part_class.from_config(dict(settings))
            conversions: list[Any] = []
        else:
            config = part_class.config_class.from_pretrained(
                folder.folder / name, local_files_only=True
            )
            network = part_class(config)
            conversions = get_model_conversion_mapping(network)
    rename = renamer_of(network, conversions) if conversions else str
    required = {key: list(tensor.shape) for key, tensor in network.state_dict().items()}
    for file in folder.weight_files(name):
        for key, tensor in read_header(file):
            shape = required.get(rename(key))
            if shape is not None and shape != list(tensor.shape):
                raise ConfigError(
                    f"models.path: {file}: {key} has the shape {list(tensor.shape)}, but"
                    f" config.json requires {shape}",
                    field="models.path",
                )
