"""Judge of the model that hears: greedy answers by transformers in float32, and the card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from ops.training.audio import Wave
from ops.training.card import Score, verdict, write_card
from ops.training.hearing.model import AUDIO_MARKS, count_tokens, transformers
from ops.training.hearing.samples import SHARES, TASKS, WORDINGS, draw_sample
from ops.training.hearing.sounds import MAX_BEEPS, MAX_S, RATE
from ops.training.hearing.speech import LOCALES, PICO_VOICES, VARIANTS, Spoken
from ops.training.judge.sounds import Case, beep_cases, digit_cases
from ops.training.trainer import State

CARD = Path(__file__).with_name("card.md")
GOALS = {"count": 90.0, "level": 90.0, "digit": 90.0}


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
        output_ids = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=output["input_features"],
            feature_attention_mask=output["attention_mask"],
            max_new_tokens=16,
        )
        text: str = self._tokenizer.decode(output_ids[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def evaluate(folder: Path, bank: Sequence[Spoken], seed: int) -> list[Score]:
    """Return scores by kind, for the judge's sounds and for new sounds of the training's kind."""
    rng = np.random.default_rng(seed)
    # The judge's sounds are made first, so that a change of the training does not change them.
    cases = [*digit_cases(rng), *beep_cases(rng, 12)]
    drawn = (draw_sample(rng, bank) for _ in range(150))
    own = [
        Case(f"training's own {s.task}", s.question, s.answer, s.wave, "")
        for s in drawn
        if s.wave is not None
    ]
    listener = Listener(folder)
    scores: dict[str, Score] = {}
    for case in [*cases, *own]:
        answer = listener.listen(case.wave, case.question)
        for name in [case.kind, *([f"{case.kind}, {case.source}"] if case.source else [])]:
            scores.setdefault(name, Score(name, GOALS.get(name))).add(case.answer, answer)
    return list(scores.values())


def write_hearing_card(
    folder: Path, scores: Sequence[Score], layers: int, width: int, batch: int, state: State
) -> None:
    with safe_open(folder / "model.safetensors", "numpy") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    write_card(
        folder,
        CARD,
        beeps=MAX_BEEPS,
        parameters=sum(map(prod, shapes)) / 1e6,
        layers=layers,
        width=width,
        longest=MAX_S,
        rows="\n".join(score.row for score in scores),
        verdict=verdict(scores),
        mistakes="\n".join(_mistakes({score.name: score for score in scores})) or "- nothing",
        voices=len(VARIANTS),
        locales=len(LOCALES),
        pico=len(PICO_VOICES),
        tasks=", ".join(f"{t} {share:.0%}" for t, share in zip(TASKS, SHARES, strict=True)),
        wordings=sum(map(len, WORDINGS.values())),
        state=state,
        batch=batch,
        cpu=state.cpu_s / 60,
        minutes=state.elapsed_s / 60,
    )


def _mistakes(scores: Mapping[str, Score]) -> Iterator[str]:
    for name in (*GOALS, "description"):
        counts = Counter(f"{right} as {answer}" for right, answer in scores[name].mistakes)
        if counts:
            mistakes = (f"{mistake} ({n})" for mistake, n in counts.most_common(6))
            yield f"- {name}: {', '.join(mistakes)}"
