"""Plan by which the ranks of an engine share a model, read from its config without torch.

transformers' configs name the layers of a decoder that ranks can divide, with a style for each.
The other layers are whole in each rank.
"""

import re
from typing import Any, NamedTuple

from shared.errors import ConfigError

FIELD = "engine.tensor_parallel"
COLWISE = frozenset({"colwise", "packed_colwise"})
"""Styles that divide the outputs of a layer."""
ROWWISE = frozenset({"rowwise", "packed_rowwise"})
"""Styles that divide its inputs. `packed` ones divide each half of the matrix."""
EXPERTS = "moe_tp_experts"
SUMMED = frozenset({"rowwise", EXPERTS})
"""Styles of modules that give a part of a sum."""
WHOLE = frozenset({"local_params", "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce"})
STYLES = COLWISE | ROWWISE | SUMMED | WHOLE
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Share(NamedTuple):
    """The part of a model that one rank has."""

    rank: int
    num_ranks: int


def read_plan(text_config: Any) -> dict[str, str]:
    """Return the style of each layer of a decoder by name, with `*` for the numbers of layers.

    Raises ConfigError for a decoder that ranks cannot share.
    """
    plan: dict[str, str] = text_config.base_model_tp_plan or {}
    if not plan:
        refuse(f"transformers has no plan that divides models of type {text_config.model_type!r}")
    for name, style in plan.items():
        if style not in STYLES:
            refuse(
                f"the plan for models of type {text_config.model_type!r} divides {name} by"
                f" {style!r}, which is not supported"
            )
    if text_config.per_layer_attributes or getattr(text_config, "hidden_size_per_layer_input", 0):
        refuse("layers that differ, and layers that use the ids of tokens, are not supported")
    return plan


def check_heads(text_config: Any, num_ranks: int) -> None:
    """Raise ConfigError if `num_ranks` ranks cannot share the heads of a decoder."""
    num_heads = text_config.num_attention_heads
    if num_heads % num_ranks:
        refuse(f"{num_ranks} ranks cannot share {num_heads} attention heads equally")
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        refuse(f"{num_ranks} ranks cannot share {num_kv_heads} heads of keys and values equally")


def refuse(reason: str) -> None:
    raise ConfigError(f"{FIELD}: {reason}", field=FIELD)


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return the style of a weight or module of a decoder; None if the plan does not name it."""
    return plan.get(_NUMBER.sub("*", name))


def divided_layers(plan: dict[str, str]) -> list[str]:
    """Return the names of the layers that ranks divide, with `*` for numbers."""
    return [name for name, style in plan.items() if style not in WHOLE]


def divides_heads(plan: dict[str, str]) -> bool:
    """Return whether ranks have different heads; some plans divide only the experts."""
    projections = (name.split(".") for name, style in plan.items() if style in ROWWISE)
    return any("attn" in path[-2] or "attention" in path[-2] for path in projections)


def set_local_heads(text_config: Any, num_ranks: int) -> None:
    """Change the config of a rank's decoder to the numbers of its heads."""
    if not divides_heads(read_plan(text_config)):
        return
    num_heads = text_config.num_attention_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    if not getattr(text_config, "head_dim", None):
        text_config.head_dim = text_config.hidden_size // num_heads
    text_config.num_attention_heads = num_heads // num_ranks
    text_config.num_key_value_heads = max(1, num_kv_heads // num_ranks)
