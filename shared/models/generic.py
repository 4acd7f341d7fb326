"""Generic families: model types without a declaration, served through transformers' own modules.

A type qualifies by the source of its class in transformers. The source is read and not imported,
because an import needs torch, which renderers hide. When such a model is loaded, the engine
compares its answers with transformers' own.
"""

from functools import cache
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from shared.models.family import ModelFamily, Source

TESTED_TYPES = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "axk1",
        "aria_text",
        "bamba",
        "beam",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "ctrl",
        "cwm",
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "falcon_h1",
        "flex_olmo",
        "flint",
        "gemma3n_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "kolibri1",
        "laguna",
        "lfm2",
        "lfm2_moe",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "nanochat",
        "nemotron_h",
        "olmo",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi4_multimodal",
        "phimoe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "seed_oss",
        "solar_open",
        "starcoder2",
        "vaultgemma",
        "youtu",
    }
)
"""Model types whose answers a test compares with transformers'."""

EXCHANGEABLE = "_supports_attention_backend = True"
RECURRENT = "get_conv_state("
"""Mark of hybrid models. All of them call a function of attention by its name, although most of
their classes do not declare it."""
FIXED_ATTENTION = "transformers' model of this type runs with no other attention function"


def generic_family(model_type: str) -> ModelFamily | None:
    """Return the family of a type without a declared one; None if the type cannot be served."""
    if find_obstacle(model_type) is not None:
        return None
    source: Source = "generic" if model_type in TESTED_TYPES else "generic, untested"
    return ModelFamily(model_type, frozenset({model_type}), source=source)


@cache
def find_obstacle(model_type: str) -> str | None:
    """Return the reason why no generic family serves a model type; None if one does."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if class_name is None:
        return "transformers has no causal language model of this type"
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "models of this type are encoders, in which a token depends on later tokens"
    if not is_exchangeable(read_source(class_name)):
        return FIXED_ATTENTION
    return find_missing_package(model_type)


def is_exchangeable(source: str) -> bool:
    """Return whether transformers' model of this source runs with another attention function."""
    return EXCHANGEABLE in source or (RECURRENT in source and "ALL_ATTENTION_FUNCTIONS" in source)


def find_missing_package(model_type: str) -> str | None:
    """Return the reason against a type whose tower needs another package; None for others."""
    if MODEL_MAPPING_NAMES.get(f"{model_type}_vision") == "TimmWrapperModel":
        return "its vision tower needs the package timm"
    return None


def read_source(class_name: str) -> str:
    """Return the source of the module in which transformers defines a class."""
    # Without torch, the attribute is a placeholder with the name of the module.
    module: str = getattr(transformers, class_name).__module__
    folder = Path(transformers.__file__).parent
    file = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return file.read_text(encoding="utf-8")
