"""The card of the trained model: its size, its scores and its training."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from ops.demo_training.evaluation import ROW_NAMES, Score
from ops.demo_training.scenes import COLOUR_NAMES, MAX_PIXELS, SHAPE_NAMES
from ops.demo_training.trainer import Settings, State

CARD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---

# Pagemill demo model

A Qwen2-VL of {parameters:.1f} million parameters, trained on questions about simple pictures:
plain colours, shapes, small counts, single digits and letters, the side on which a shape is, and
whether two pictures have the same colour. How well it does each is measured below. It exists so
that Pagemill can be tried, tested and shown anywhere, without a download and without a GPU. It is
of no other use: on a photograph its answers mean nothing.

- Vision tower {tower_layers} layers of {tower_width}, text model {text_layers} layers of
  {text_width}, {vocabulary} tokens, a context of {context} tokens, weights in float16.
- A picture of any size is resized to at most {max_side} x {max_side} pixels' worth of area, which
  makes about 8 to 12 image tokens.
- Trained and evaluated by `ops/demo_training` on pictures that the program draws itself.
- Colours: {colours}. Shapes: {shapes}.

## Evaluation

{asked} cases a row, held-out pictures that were not trained on, mean side 56 to 640 pixels,
different aspect ratios, the picture before or after the text, many wordings of each question.
Greedy decoding in float32 through transformers; only the exact answer counts.

| task | exact | mark |
| --- | --- | --- |
{rows}

{verdict}

## Training

{training}
"""


def write_card(path: Path, scores: dict[str, Score], training: str) -> None:
    config: Any = Qwen2VLConfig.from_pretrained(path)
    model = Qwen2VLForConditionalGeneration.from_pretrained(path)
    rows = [
        f"| {ROW_NAMES[name]} | {score.percent:.1f} % | {score.wanted} |"
        for name, score in scores.items()
    ]
    short = [ROW_NAMES[name] for name, score in scores.items() if score.percent < (score.mark or 0)]
    verdict = "Every task reaches its mark."
    if short:
        verdict = f"Below the mark: {'; '.join(short)}."
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        tower_layers=config.vision_config.depth,
        tower_width=config.vision_config.embed_dim,
        text_layers=config.text_config.num_hidden_layers,
        text_width=config.text_config.hidden_size,
        vocabulary=config.text_config.vocab_size,
        context=config.text_config.max_position_embeddings,
        max_side=math.isqrt(MAX_PIXELS),
        colours=", ".join(COLOUR_NAMES),
        shapes=", ".join(SHAPE_NAMES),
        asked=next(iter(scores.values())).asked,
        rows="\n".join(rows),
        verdict=verdict,
        training=training,
    )
    (path / "README.md").write_text(card, encoding="utf-8")


def training_note(settings: Settings, state: State) -> str:
    if settings.device.type == "cuda":
        machine = f"one {torch.cuda.get_device_name(settings.device)}"
    else:
        machine = f"{os.cpu_count()} CPU cores, without a GPU"
    lines = [f"Trained on {machine}:", ""]
    for name, samples, seconds in zip(
        ("tower alone", "tower and text together"), state.samples, state.seconds, strict=True
    ):
        rate = samples / max(seconds, 1e-9)
        lines.append(
            f"- {name}: {samples:,} samples in {seconds / 60:.0f} minutes ({rate:,.0f} a second)"
        )
    return "\n".join(lines)
