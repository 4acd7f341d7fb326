"""Layers of a decoder that keep a state of a fixed size for each sequence, from its config.

A hybrid model has such recurrent layers besides its layers with attention. The module does not load
torch, because `pagemill models` reads configs without it.
"""

import math
from typing import Any, NamedTuple

RECURRENT_KINDS = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers with a state. A `hybrid` layer also has attention."""
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "hybrid"})
FEED_FORWARD_KINDS = frozenset({"moe", "mlp"})
"""Kinds of layers that store nothing."""


class StateShape(NamedTuple):
    """State of a sequence in one layer."""

    conv: tuple[int, int]
    """Channels and length of the last inputs of the convolution, in the dtype of the model."""
    recurrent: tuple[int, int, int] | None
    """Shape of the recurrent state, which transformers computes in float32; None for a layer that
    is only a convolution."""


def layer_kinds(text_config: Any) -> list[str]:
    """Return the kind of each layer; without `layer_types`, all layers have attention."""
    kinds = getattr(text_config, "layer_types", None)
    return list(kinds or ["full_attention"] * text_config.num_hidden_layers)


def recurrent_layers(text_config: Any) -> list[int]:
    """Return the indexes of the layers that keep a state."""
    kinds = layer_kinds(text_config)
    return [index for index, kind in enumerate(kinds) if kind in RECURRENT_KINDS]


def find_state_shape(text_config: Any) -> StateShape | None:
    """Return the shape of a layer's state; None for a config of an unknown form."""
    text = text_config
    if "conv" in layer_kinds(text):
        return StateShape((text.hidden_size, text.conv_L_cache), None)
    if hasattr(text, "linear_key_head_dim"):
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        heads, value_dim = text.linear_num_value_heads, text.linear_value_head_dim
        conv = (2 * keys + heads * value_dim, text.linear_conv_kernel_dim)
        return StateShape(conv, (heads, text.linear_key_head_dim, value_dim))
    if hasattr(text, "mamba_n_groups"):
        heads, head_dim, size = text.mamba_n_heads, text.mamba_d_head, text.mamba_d_state
        groups, length = text.mamba_n_groups, text.mamba_d_conv
    elif hasattr(text, "mamba_num_heads"):
        heads, head_dim, size = text.mamba_num_heads, text.mamba_head_dim, text.ssm_state_size
        groups, length = text.n_groups, text.conv_kernel
    else:
        return None
    return StateShape((heads * head_dim + 2 * groups * size, length), (heads, head_dim, size))


def count_state_bytes(text_config: Any) -> int:
    """Return the bytes of a sequence's states, with convolutions in float32."""
    shape = find_state_shape(text_config)
    num_layers = len(recurrent_layers(text_config))
    if shape is None or not num_layers:
        return 0
    num_values = math.prod(shape.conv) + (math.prod(shape.recurrent) if shape.recurrent else 0)
    return num_layers * num_values * 4
