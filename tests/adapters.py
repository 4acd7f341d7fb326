"""LoRA adapters in peft's format with random weights, and models with merged adapters."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    targets: Sequence[str],
    rank: int,
    alpha: float,
    seed: int,
    spread: float = 0.5,
    **config: Any,
) -> Path:
    """Write an adapter for all layers of the model whose names end in one of `targets`."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        scaled: torch.Tensor = torch.randn(*shape, generator=generator) * spread * shape[1] ** -0.5
        return scaled

    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(tuple(f".{target}" for target in targets)):
            out_features, in_features = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = weight(rank, in_features)
            tensors[f"base_model.model.{name}.lora_B.weight"] = weight(out_features, rank)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a copy of the model with W + scale * B A for W; adapters have no rank patterns."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    copied = copy.deepcopy(model)
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")]
            copied.get_submodule(name).weight.data += scale * b @ a
    return copied
