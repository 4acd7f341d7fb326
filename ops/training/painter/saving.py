"""The painter's folder: what a generator loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.generator.painter import PainterShape
from workers.generator.painter_model import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, PainterConfig

TOKENIZER = Path(__file__).resolve().parents[2] / "demo_model" / TOKENIZER_FILE
# The tokenizer's <|endoftext|>, which no prompt has.
PAD_ID = 754
SCALE = 5


def save_folder(weights: dict[str, Tensor], shape: PainterShape, out: Path) -> None:
    """Write the weights in half precision, the sizes, and the demo model's tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    half = {name: value.to(torch.float16).contiguous() for name, value in weights.items()}
    save_file(half, out / WEIGHTS_FILE, {"format": "pt"})
    config = PainterConfig(
        "pagemill_painter",
        shape.width,
        shape.depth,
        shape.patch,
        shape.num_tokens,
        shape.max_text,
        PAD_ID,
        SCALE,
    )
    text = msgspec.json.format(msgspec.json.encode(config), indent=2)
    (out / CONFIG_FILE).write_bytes(text + b"\n")
    shutil.copyfile(TOKENIZER, out / TOKENIZER_FILE)
