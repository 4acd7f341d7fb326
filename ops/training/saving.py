"""Files of checkpoints and of finished models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def save_checkpoint(checkpoint: dict[str, Any], file: Path) -> None:
    """Write a new file and rename it: an interruption leaves the old checkpoint."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save(checkpoint, part)
    part.replace(file)


def save_half(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model, or other weights for it, and its tokenizer in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    half: Any = type(model)(model.config)
    half.to(torch.float16)
    half.load_state_dict(model.state_dict() if weights is None else weights)
    half.generation_config = model.generation_config
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
