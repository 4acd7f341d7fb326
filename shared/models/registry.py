"""Registry of model families, which discovers the modules in `shared.models.families`."""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from shared.models import families
from shared.models.family import DecoderTrait, ModelFamily, Source
from shared.models.generic import TESTED_TYPES, generic_family
from shared.models.generic_hearing import TESTED_SOUND_TYPES, sound_family
from shared.models.generic_vision import TESTED_IMAGE_TYPES, image_family
from shared.models.language import LanguageAdapter
from shared.models.tower_adapter import TowerAdapter

_families: dict[str, ModelFamily] = {}
"""Families by `model_type`."""
_decoders: dict[str, frozenset[DecoderTrait]] = {}
"""Traits of decoders by the `model_type` of the text config."""


def register(family: ModelFamily) -> None:
    """Add a family. Raises ValueError for a model type that another family has."""
    if duplicates := family.model_types & _families.keys():
        raise ValueError(f"{', '.join(sorted(duplicates))} belongs to another family")
    _families.update(dict.fromkeys(family.model_types, family))
    _decoders.update(family.decoders)


def find_family(config: PreTrainedConfig) -> ModelFamily | None:
    """Return the declared or the generic family of a model; None for an unsupported type."""
    _discover()
    model_type = config.model_type
    if (family := _families.get(model_type)) is not None:
        return family
    generic = (image_family, sound_family, generic_family)
    return next(filter(None, (find(model_type) for find in generic)), None)


def find_source(config: PreTrainedConfig) -> Source | None:
    """Return the origin of a model's family; None for an unsupported type."""
    family = find_family(config)
    return None if family is None else family.source


def find_decoder_traits(text_config: PreTrainedConfig) -> frozenset[DecoderTrait]:
    _discover()
    return _decoders.get(text_config.model_type, frozenset())


def list_families() -> list[ModelFamily]:
    """Return the declared families and the generic ones of tested types, by name."""
    generic = [
        *map(generic_family, TESTED_TYPES),
        *map(image_family, TESTED_IMAGE_TYPES),
        *map(sound_family, TESTED_SOUND_TYPES),
    ]
    return sorted([*_declared(), *filter(None, generic)], key=lambda family: family.name)


def list_text_model_types() -> list[str]:
    """Return the model types of declared families that accept only text, sorted."""
    _discover()
    return sorted(name for name, family in _families.items() if family.tower is None)


def find_tower(config: PreTrainedConfig) -> TowerAdapter | None:
    """Return the tower adapter of a model; None for a model without a tower.

    Raises ConfigError for a tower that the family does not support.
    """
    family = find_family(config)
    return None if family is None or family.tower is None else family.tower(config)


def find_model_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class that loads a model."""
    family = find_family(config)
    if family is not None and family.model_class is not None:
        return getattr(transformers, family.model_class)
    if family is None or family.tower is None:
        return AutoModelForCausalLM
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def adapt(model: PreTrainedModel) -> LanguageAdapter:
    """Wrap a model, which may lack its tower, in the language adapter of its family."""
    family = find_family(model.config)
    if family is None:
        return LanguageAdapter(model)
    placeholders = {str(name): media.placeholder for name, media in family.media.items()}
    return family.language(model, find_tower(model.config), placeholders)


@cache
def _discover() -> None:
    for family in _declared():
        register(family)


def _declared() -> Iterator[ModelFamily]:
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        yield from importlib.import_module(module.name).FAMILIES
