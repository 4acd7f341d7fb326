"""Talkers of omni models, by the kind in the family's declaration."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from shared.errors import ConfigError
from shared.models.registry import find_family
from shared.stage.graphs import graph_of_folder
from workers.engine.model.talker import MediaParts, Talker

LoadTalker = Callable[[torch.dtype, str, MediaParts], Talker]


def find_talker(folder: Path) -> LoadTalker | None:
    """Return the function that loads the talker of a model's folder; None for other families.

    Raises ConfigError for the folder of an omni model without a talker.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    family = find_family(config)
    if family is not None and family.talker is not None and graph_of_folder(folder) is None:
        raise ConfigError(
            f"models.path: {folder} has no talker: its config.json lacks talker_config, or has"
            " enable_audio_output: false",
            field="models.path",
        )
    # Other engines need none of transformers' omni modules.
    match None if family is None else family.talker:
        case "code_predictor":
            from workers.engine.model import qwen3_talker

            return partial(qwen3_talker.load, folder, config)
        case "thinker_states":
            from workers.engine.model import qwen2_5_talker

            return partial(qwen2_5_talker.load, folder, config)
        case _:
            return None
