"""How well the voice is understood: what the judge takes the talker's speech for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from ops.training.seeing.scenes import console
from ops.training.voice.codec import SAMPLE_RATE
from ops.training.voice.corpus import Corpus
from ops.training.voice.listening import Listener
from ops.training.voice.talker import prompt_of, speak
from ops.training.voice.texts import Answer, Kind
from shared.protocol.chunks import ChunkSpec
from workers.generator.core.schedule import Window
from workers.generator.core.vocoder import Vocoder, cut
from workers.generator.loader import load_vocoder

FEWEST_CODES = 4

Spoken = list[tuple[Answer, list[int]]]


@dataclass(slots=True)
class Score:
    name: str
    mark: float | None
    asked: int = 0
    right: int = 0
    wrong: list[tuple[str, str | None]] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100 * self.right / max(1, self.asked)

    def add(self, text: str, taken_for: str | None) -> None:
        self.asked += 1
        self.right += text == taken_for
        if text != taken_for:
            self.wrong.append((text, taken_for))


def sound_of(vocoder: Vocoder, codes: Sequence[int]) -> NDArray[np.float32]:
    """Return the samples of a whole utterance; full scale is 1."""
    window = Window(0, 0, len(codes), len(codes))
    chunk = cut(vocoder, np.array(codes, np.int32)[:, None], window)
    (samples,) = vocoder.synthesize([chunk])
    return (samples / 32768).astype(np.float32)


def judge(name: str, mark: float | None, spoken: Spoken, corpus: Corpus, speaker: Vocoder) -> Score:
    """Hears each answer among all answers of its kind."""
    score, listeners = Score(name, mark), dict[Kind, Listener]()
    for answer, codes in spoken:
        kind = answer.kind
        if kind not in listeners:
            listeners[kind] = Listener(corpus.templates(kind))
        taken_for = None
        if len(codes) >= FEWEST_CODES:
            taken_for = listeners[kind].hear(sound_of(speaker, codes), SAMPLE_RATE)
        score.add(answer.text, taken_for)
    console.log(f"{name}: {score.right} of {score.asked}; wrong: {score.wrong[:8]}")
    return score


def evaluate(out: Path, corpus: Corpus, cases: int, seed: int) -> list[Score]:
    model = Qwen2ForCausalLM.from_pretrained(out / "talker", dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "talker")
    vocoder = load_vocoder(out, ChunkSpec(), "the voice")
    rng = random.Random(f"{seed}/judged")

    def chosen(kind: Kind, is_held_out: bool = False) -> Spoken:
        pairs = zip(corpus.answers, corpus.codes, strict=True)
        found = [
            (answer, codes.tolist())
            for answer, codes in pairs
            if answer.kind == kind and answer.is_held_out == is_held_out
        ]
        return found if len(found) <= cases else rng.sample(found, cases)

    def said(pairs: Spoken) -> Spoken:
        texts = [answer for answer, _ in pairs]
        prompts = [prompt_of(tokenizer, answer.text) for answer in texts]
        return list(zip(texts, speak(model, prompts), strict=True))

    short, sentences = chosen("short"), chosen("sentence")
    held_out, trained = chosen("description", True), chosen("description")
    plan = [
        ("recorded codes of short answers", None, short),
        ("recorded codes of held-out descriptions", None, held_out),
        ("short answers", 95.0, said(short)),
        ("sentences about itself", None, said(sentences)),
        ("held-out descriptions", 90.0, said(held_out)),
        ("trained descriptions", None, said(trained)),
    ]
    return [judge(name, mark, pairs, corpus, vocoder) for name, mark, pairs in plan if pairs]
