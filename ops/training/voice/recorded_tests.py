"""What the tests compare the voice with: greedy codes, and what the judge knows the answers by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from ops.training.voice.corpus import Corpus
from ops.training.voice.talker import prompt_of, speak

CODES_FILE, TEMPLATES_FILE = "demo_voice_codes.json", "demo_voice_templates.safetensors"
TEXTS = ("red", "circle", "yes", "left", "7", "W", "a red circle on blue")


def write_recorded(out: Path, corpus: Corpus, folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(out / "talker", dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "talker")
    codes = speak(model, [prompt_of(tokenizer, text) for text in TEXTS])
    rows = [f" {json.dumps(text)}: {row}" for text, row in zip(TEXTS, codes, strict=True)]
    joined = ",\n".join(rows)
    (folder / CODES_FILE).write_text(f"{{\n{joined}\n}}\n", encoding="utf-8")
    templates = corpus.templates("short")
    arrays = {text: rows.astype(np.float16) for text, rows in templates.items()}
    save_file(arrays, folder / TEMPLATES_FILE)
