"""Model support: refuses, when it is loaded, a model that the engine would answer wrongly.

This module alone decides it. A family is served when a test compares its tokens with those of
transformers; a config may still ask for features that the engine does not have.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from shared.errors import ConfigError
from shared.models import registry
from workers.engine.model.step_plan import Window

LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})

# Rotary frequencies of these types depend on the longest sequence of a batch, so the answer to a
# request would depend on the other requests.
BATCH_ROPE = frozenset({"dynamic", "longrope"})

# Model types with these prefixes have a state of a fixed size instead of keys and values per token.
RECURRENT = ("mamba", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma")

# Returns the reason from a model's config and its text config; None if the model is not concerned.
_Refusal = Callable[[Any, Any], str | None]


def check_supported(config: PreTrainedConfig, folder: Path) -> None:
    """Raises ConfigError, with the reason, for a model that would be answered wrongly."""
    text_config = config.get_text_config(decoder=True)
    for refusal in _REFUSALS:
        if (reason := refusal(config, text_config)) is not None:
            raise ConfigError(f"models.path: {folder} {reason}", field="models.path")


def layer_windows(text_config: PreTrainedConfig) -> list[Window]:
    """Return the attention window of each layer, in tokens.

    Without `layer_types` one window holds for all layers, as in Mistral.
    """
    window: Window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if not kinds:
        return [window] * int(text_config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _cross_attention(config: Any, text: Any) -> str | None:
    if config.is_encoder_decoder or getattr(text, "cross_attention_layers", None):
        return "uses cross attention, for which the engine has no cache"
    return None


def _recurrence(config: Any, text: Any) -> str | None:
    if config.model_type.startswith(RECURRENT):
        return "keeps a state instead of keys and values, which cannot be paged"
    return None


def _layer_kinds(config: Any, text: Any) -> str | None:
    other = set(getattr(text, "layer_types", None) or []) - LAYER_KINDS
    if other:
        return f"uses {', '.join(sorted(other))}; the engine serves full and sliding attention only"
    return None


def _stray_window(config: Any, text: Any) -> str | None:
    kinds, window = (getattr(text, name, None) for name in ("layer_types", "sliding_window"))
    if window and not kinds and "one_window" not in registry.find_decoder_traits(text):
        # transformers' layers ignore the window, and its cache does not.
        return f"names a sliding window, which a model of type {text.model_type!r} does not have"
    return None


def _alibi(config: Any, text: Any) -> str | None:
    nested = getattr(text, "attn_config", None)
    if text.model_type == "bloom" or any(getattr(c, "alibi", False) for c in (text, nested)):
        return "uses ALiBi, a bias on the scores that the engine's attention does not have"
    return None


def _sinks(config: Any, text: Any) -> str | None:
    if text.model_type.startswith(("gpt_oss", "granite_swa", "granitemoe_swa")):
        return "uses attention sinks, which the engine's attention does not have"
    return None


def _latent_attention(config: Any, text: Any) -> str | None:
    if getattr(text, "kv_lora_rank", None):
        return "uses latent attention; the engine's cache has keys and values of one size"
    return None


def _bidirectional(config: Any, text: Any) -> str | None:
    if getattr(text, "use_bidirectional_attention", None):
        return "uses bidirectional attention, in which a token's cache depends on later tokens"
    return None


def _rope(config: Any, text: Any) -> str | None:
    rope = getattr(text, "rope_parameters", None) or {}
    # Some families have separate frequencies for each kind of layer.
    by_kind = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_kind or [rope]:
        if parameters.get("rope_type") in BATCH_ROPE:
            return (
                f"uses {parameters['rope_type']} rotary positions, which depend on the other"
                " requests of a batch"
            )
    return None


def _family(config: Any, text: Any) -> str | None:
    if registry.find_family(config) is None:
        return (
            f"is of type {config.model_type!r}, for which the engine has no family; for text it has"
            f" {', '.join(registry.list_text_model_types())}"
        )
    return None


_REFUSALS: tuple[_Refusal, ...] = (
    _cross_attention,
    _recurrence,
    _layer_kinds,
    _stray_window,
    _alibi,
    _sinks,
    _latent_attention,
    _bidirectional,
    _rope,
    _family,
)
