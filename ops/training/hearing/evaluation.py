"""Greedy answers of the trained folder, by transformers in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from ops.training.hearing.judging import Case, beep_cases, digit_cases
from ops.training.hearing.model import AUDIO_MARKS, count_tokens, transformers
from ops.training.hearing.samples import draw_sample
from ops.training.hearing.sounds import RATE, Wave
from ops.training.hearing.speech import Spoken


@dataclass(slots=True)
class Score:
    right: int = 0
    asked: int = 0
    mistakes: Counter[str] = field(default_factory=Counter)


class Listener:
    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        kind = transformers.Qwen2_5OmniThinkerForConditionalGeneration
        self._model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self._extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)

    @torch.inference_mode()
    def listen(self, wave: Wave, question: str) -> str:
        """Return the greedy answer to a question about a sound."""
        output = self._extractor(
            wave, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
        )
        num_frames = int(output["attention_mask"].sum())
        content = [{"type": "audio"}, {"type": "text", "text": question}]
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        mark = AUDIO_MARKS[1]
        prompt = prompt.replace(mark, mark * count_tokens(num_frames))
        ids = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        told = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=output["input_features"],
            feature_attention_mask=output["attention_mask"],
            max_new_tokens=16,
        )
        text: str = self._tokenizer.decode(told[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def evaluate(folder: Path, bank: Sequence[Spoken], seed: int) -> dict[str, Score]:
    """Scores by kind, of new sounds of the training's own kind and of those that judge."""
    rng = np.random.default_rng(seed)
    # First, so that a change of the training's sounds leaves them as they are.
    cases = [*digit_cases(rng), *beep_cases(rng, 12)]
    drawn = (draw_sample(rng, bank) for _ in range(150))
    own = [
        Case(f"training's own {s.task}", s.question, s.answer, s.wave, "training")
        for s in drawn
        if s.wave is not None
    ]
    listener = Listener(folder)
    scores: dict[str, Score] = {}
    for case in [*cases, *own]:
        told = listener.listen(case.wave, case.question)
        names = [case.kind]
        if not case.kind.startswith("training"):
            names.append(f"{case.kind}, {case.source}")
        for name in names:
            score = scores.setdefault(name, Score())
            score.asked += 1
            score.right += told == case.answer
            if told != case.answer:
                score.mistakes[f"{case.answer} as {told}"] += 1
    return scores
