"""Refusal of models that ranks cannot share. The module does not load torch."""

from pathlib import Path

from transformers import PreTrainedConfig

from shared.models import registry
from shared.models.states import recurrent_layers
from shared.vision.quantized import read_quantized
from shared.vision.rank_plan import check_heads, divided_layers, divides_heads, read_plan, refuse
from workers.engine.model.support import attends_items, kv_shapes


def check_ranks(config: PreTrainedConfig, folder: Path, num_ranks: int) -> list[str]:
    """Return the names of the layers that ranks divide, with `*` for numbers.

    Raises ConfigError for a model that an engine of this many ranks cannot run correctly.
    """
    if num_ranks == 1:
        return []
    text = config.get_text_config(decoder=True)
    plan = read_plan(text)
    if (source := registry.find_source(config)) not in ("native", "generic"):
        refuse(f"models of type {config.model_type!r} are not supported, as they are {source}")
    if read_quantized(folder) is not None:
        refuse("quantized weights are not supported")
    if recurrent_layers(text):
        refuse("models with states in recurrent layers are not supported")
    if attends_items(config):
        refuse("models with cross attention are not supported")
    if divides_heads(plan):
        check_heads(text, num_ranks)
        if len({shape.num_kv_heads for shape in kv_shapes(text)}) > 1:
            refuse("layers with different numbers of heads are not supported")
    return divided_layers(plan)
