"""Training of the model that sees.

It has two phases, because a model of this size learns nothing spatial when it is trained end to end
from random weights: first the vision tower alone under plain classification heads, then the tower
(at a lower rate) and the text model together on questions and answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from ops.training.saving import save_half, save_json
from ops.training.seeing.batches import Batches, ChatBatch, TowerBatch, chat_batch, tower_batch
from ops.training.seeing.model import Heads, build_model, chat_loss, tower_loss
from ops.training.seeing.scenes import MAX_PIXELS, MEAN, MERGE, MIN_PIXELS, PATCH, STD
from ops.training.seeing.tokenizer import Encoder, load_tokenizer
from ops.training.trainer import State, Task, late_fall

TOWER_RATE = 1.2e-3
TEXT_RATE = 1.5e-3
# Part of the rates for weights that have been trained before.
CONTINUED_SHARE = 0.3
# The rates are constant, and fall in the last part of the time.
FALL_SHARE = 0.5
LAST_RATE = 0.02
FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 8


@dataclass(frozen=True, slots=True)
class Plan:
    out: Path
    device: torch.device
    seed: int
    batch: int
    workers: int
    first: Path | None
    """Folder of a model whose weights the second phase begins with, in place of the first phase."""


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch, or a part of it, on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, int):
        return batch
    if isinstance(batch, list):
        return [moved(item, device) for item in batch]
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    names = batch.__dataclass_fields__
    return type(batch)(**{name: moved(getattr(batch, name), device) for name in names})


def first_model(plan: Plan) -> Any:
    """Return the model that the training begins with: random weights, or an older model."""
    torch.manual_seed(plan.seed)
    model: Any = build_model(load_tokenizer(plan.first or plan.out))
    if plan.first is not None:
        first = Qwen2VLForConditionalGeneration.from_pretrained(plan.first)
        model.load_state_dict({k: v.float() for k, v in first.state_dict().items()})
    return model.to(plan.device)


def loaded(
    plan: Plan,
    make: Callable[[random.Random, float], Any],
    stream: str,
    progress: Synchronized[float],
) -> Iterator[Any]:
    """Yield batches that other processes draw."""
    batches = DataLoader(
        Batches(make, f"{plan.seed}/train/{stream}", progress),
        batch_size=None,
        num_workers=plan.workers,
        prefetch_factor=4,
        multiprocessing_context="fork",
    )
    for batch in batches:
        yield moved(batch, plan.device)


def adamw(groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)]


class Tower(Task[TowerBatch]):
    """First phase: the vision tower alone."""

    def __init__(self, plan: Plan, model: Any) -> None:
        self.plan, self.visual = plan, model.model.visual
        self.heads = Heads(model.config.text_config.hidden_size).to(plan.device)
        self.network = nn.ModuleDict({"visual": self.visual, "heads": self.heads})
        self.optimizers = adamw([{"params": list(self.network.parameters()), "lr": TOWER_RATE}])

    def fall(self, progress: float) -> float:
        return late_fall(progress, FALL_SHARE, LAST_RATE)

    def draw(self, steps: int, progress: Synchronized[float]) -> Iterator[TowerBatch]:
        # A tower alone needs larger batches to keep a processor busy.
        size = 2 * self.plan.batch
        return loaded(self.plan, lambda rng, at: tower_batch(rng, size, at), f"1/{steps}", progress)

    def loss(self, batch: TowerBatch, progress: float) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast(self.plan.device.type, dtype=torch.bfloat16):
            return tower_loss(self.visual, self.heads, batch)

    def save(self, weights: Mapping[str, Tensor], state: State) -> None:
        """Write nothing: the checkpoint has the tower, and the second phase begins with it."""


class Chat(Task[ChatBatch]):
    """Second phase: the whole model on conversations. `tower` is the state of the first phase."""

    average_decay = 0.998

    def __init__(self, plan: Plan, model: Any, tower: State | None = None) -> None:
        self.plan, self.tower = plan, tower
        self.network = self.model = model
        self.tokenizer = load_tokenizer(plan.first or plan.out)
        share = 1.0 if plan.first is None else CONTINUED_SHARE
        self.visual = list(model.model.visual.parameters())
        self.text = [p for name, p in model.named_parameters() if "visual" not in name]
        self.optimizers = adamw(
            [
                {"params": self.text, "lr": TEXT_RATE * share},
                {"params": self.visual, "lr": TOWER_RATE * max(share, 0.4) / 2},
            ]
        )

    def clipped(self) -> list[list[nn.Parameter]]:
        return [self.text, self.visual]

    def fall(self, progress: float) -> float:
        return late_fall(progress, FALL_SHARE, LAST_RATE)

    def draw(self, steps: int, progress: Synchronized[float]) -> Iterator[ChatBatch]:
        # Plain names: the processes that draw must not take the model along.
        size, encoder = self.plan.batch, Encoder(self.tokenizer)
        return loaded(
            self.plan, lambda rng, _: chat_batch(rng, size, encoder), f"2/{steps}", progress
        )

    def loss(self, batch: ChatBatch, progress: float) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast(self.plan.device.type, dtype=torch.bfloat16):
            return chat_loss(self.model, batch)

    def save(self, weights: Mapping[str, Tensor], state: State) -> None:
        save_folder(self.model, self.tokenizer, self.plan.out, weights)
        device = self.plan.device
        on_gpu = device.type == "cuda"
        phases = {"tower alone": self.tower, "tower and text together": state}
        note = {
            "machine": torch.cuda.get_device_name(device) if on_gpu else "CPU, without a GPU",
            "start": "from the weights of the model before" if self.plan.first else "from nothing",
            "phases": [
                f"{name}: {phase.samples:,} conversations in {phase.cpu_s / 60:.0f} minutes of the "
                "processor"
                for name, phase in phases.items()
                if phase
            ],
        }
        save_json(self.plan.out / "training.json", note)


def save_folder(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a folder in the format of Hugging Face, with the weights in half precision."""
    save_half(model, tokenizer, out, weights)
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": STD,
        "rescale_factor": 1 / 255,
        "resample": int(Image.Resampling.BICUBIC),
        "size": size,
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
    }
    save_json(out / "preprocessor_config.json", processor)
    video = {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "do_sample_frames": True,
        "fps": FPS,
        "min_frames": MIN_FRAMES,
        "max_frames": MAX_FRAMES,
    }
    del processor["image_processor_type"]
    save_json(out / "video_preprocessor_config.json", processor | video)
