"""Model support: refuses models for which the engine would compute wrong answers.

A declared family is served when a test compares its tokens with the tokens of transformers. A
config of such a family may still use features that the engine does not have. Generic families are
checked again when the model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedConfig

from shared.errors import ConfigError
from shared.models import registry
from shared.models.generic_hearing import find_obstacle
from shared.models.states import (
    ATTENTION_KINDS,
    FEED_FORWARD_KINDS,
    RECURRENT_KINDS,
    find_state_shape,
    layer_kinds,
    recurrent_layers,
)
from shared.vision.quantized import read_quantized

if TYPE_CHECKING:
    # `pagemill models` runs these checks in a process without torch.
    from workers.engine.model.step_plan import Window

LAYER_KINDS = ATTENTION_KINDS | RECURRENT_KINDS | FEED_FORWARD_KINDS

# Settings that may differ between the layers of a generic family, in `per_layer_config`.
UNEQUAL = frozenset({"head_dim", "num_key_value_heads"})

# Rotary frequencies of these types depend on the longest sequence of a batch, so the answer to a
# request would depend on the other requests.
BATCH_ROPE = frozenset({"dynamic", "longrope"})

# Model types with these prefixes have a state of a fixed size instead of keys and values per token.
RECURRENT = ("mamba", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma")

NO_LIMIT = (0.0, math.inf)

# Their heads give a score or a label for a text, which no endpoint returns.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def check_supported(config: PreTrainedConfig, folder: Path) -> None:
    """Raise ConfigError, with the reason, for a model that the engine cannot run correctly."""
    reason = next(_refusals(config, config.get_text_config(decoder=True)), None)
    if reason is not None:
        raise ConfigError(f"models.path: {folder} {reason}", field="models.path")
    read_quantized(folder)


def layer_windows(text_config: PreTrainedConfig) -> list[Window]:
    """Return the attention window of each layer, in tokens.

    Without `layer_types` one window holds for all layers, as in Mistral.
    """
    window: Window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if not kinds:
        return [window] * int(text_config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in kinds]


class KVShape(NamedTuple):
    """Keys of a token in one layer. Values have the same shape, and may be padded."""

    num_kv_heads: int
    head_dim: int


def kv_shapes(text_config: Any) -> list[KVShape]:
    """Return the shape of each layer's keys; layers without attention have none."""
    layers = zip(text_config.per_layer_config, layer_kinds(text_config), strict=False)
    return [_kv_shape(*layer) for layer in layers]


def _kv_shape(layer: Any, kind: str) -> KVShape:
    num_heads: int = layer.num_attention_heads
    if kind not in ATTENTION_KINDS:
        return KVShape(0, 1)
    if getattr(layer, "kv_lora_rank", None):
        return KVShape(num_heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim)
    num_kv_heads: int = getattr(layer, "num_key_value_heads", None) or num_heads
    if layer.model_type == "mimo_v2_flash" and kind == "sliding_attention":
        num_kv_heads *= 2
    head_dim: int = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
    return KVShape(num_kv_heads, head_dim)


def num_kv_values(text_config: Any) -> int:
    """Return the number of keys and values of a token, in all layers."""
    return 2 * sum(map(math.prod, kv_shapes(text_config)))


def attends_items(config: PreTrainedConfig) -> bool:
    """Return whether a model has cross attention that the engine serves."""
    family = registry.find_family(config)
    return family is not None and family.language.attends_items


def num_item_values(config: Any) -> int:
    """Return the number of keys and values of an item, if the model has cross attention, else 0."""
    if not attends_items(config):
        return 0
    text_config = config.get_text_config(decoder=True)
    return num_kv_values(text_config) * int(config.max_source_positions)


def _refusals(config: Any, text: Any) -> Iterator[str]:
    """Yield the reasons to refuse a model, from its config and its text config."""
    is_crossed = config.is_encoder_decoder or getattr(text, "cross_attention_layers", None)
    if is_crossed and not attends_items(config):
        yield "uses cross attention, for which the engine has no cache"
    for architecture in getattr(config, "architectures", None) or []:
        if architecture.endswith(CLASSIFIERS):
            yield f"is a classifier ({architecture}), such as a cross-encoder; decoders are served"
    if config.model_type.startswith(RECURRENT):
        yield "keeps a state instead of keys and values, which cannot be paged"
    yield from _layer_refusals(text)
    source = registry.find_source(config)
    is_native = source == "native"
    accepted = frozenset() if is_native else UNEQUAL
    if unequal := set(text.per_layer_attributes or ()) - accepted:
        yield f"has layers that differ in {', '.join(sorted(unequal))} (per_layer_config)"
    one_window = "one_window" in registry.find_decoder_traits(text)
    has_kinds = bool(getattr(text, "layer_types", None))
    if is_native and getattr(text, "sliding_window", None) and not has_kinds and not one_window:
        # transformers' layers ignore the window, but its cache does not.
        yield f"names a sliding window, which a model of type {text.model_type!r} does not have"
    yield from _attention_refusals(config, text)
    for kind in sorted(_rope_types(text) & BATCH_ROPE):
        yield f"uses {kind} rotary positions, which depend on the other requests of a batch"
    if source is None:
        yield (
            f"is of type {config.model_type!r}, for which the engine has no family:"
            f" {find_obstacle(config.model_type)}"
        )


def _layer_refusals(text: Any) -> Iterator[str]:
    if other := set(layer_kinds(text)) - LAYER_KINDS:
        yield f"uses {', '.join(sorted(other))}; the engine serves full and sliding attention only"
    if not recurrent_layers(text):
        return
    if not any(kind in ATTENTION_KINDS for kind in layer_kinds(text)):
        yield "has no layer with attention; the engine counts memory in blocks of keys and values"
    if find_state_shape(text) is None:
        yield "keeps states of a form that the engine does not know"
    if tuple(getattr(text, "time_step_limit", NO_LIMIT)) != NO_LIMIT:
        yield "limits time steps, which transformers does in chunks and not in single steps"


def _attention_refusals(config: Any, text: Any) -> Iterator[str]:
    nested = getattr(text, "attn_config", None)
    if text.model_type == "bloom" or any(getattr(c, "alibi", False) for c in (text, nested)):
        yield "uses ALiBi, a bias on the scores that the engine's attention does not have"
    # transformers also uses bidirectional masks, even in a decoder, if `is_causal` is false.
    is_causal = all(getattr(section, "is_causal", True) for section in (config, text))
    # In Gemma 4, "vision" concerns the images, for which the language adapter has a rule. The same
    # holds for prompts that share no prefixes.
    both_directions = getattr(text, "use_bidirectional_attention", None)
    family = registry.find_family(config)
    has_rule = both_directions == "vision" or (family and not family.language.shares_prefixes)
    if (both_directions and not has_rule) or not is_causal:
        yield "uses bidirectional attention, in which a token's cache depends on later tokens"


def _rope_types(text: Any) -> set[Any]:
    rope = getattr(text, "rope_parameters", None) or {}
    # Some families have separate frequencies for each kind of layer.
    by_kind = [value for value in rope.values() if isinstance(value, dict)]
    return {parameters.get("rope_type") for parameters in by_kind or [rope]}
