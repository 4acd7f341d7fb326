"""Judge of the voice: counts the answers that are understood, and writes the card."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from ops.training.card import Score, verdict, write_card
from ops.training.judge.listening import Listener
from ops.training.trainer import State, console
from ops.training.voice.codec import NUM_CODES, SAMPLE_RATE
from ops.training.voice.corpus import ESPEAK_VOICE, FRAMES_COUNT, WORDS_A_MINUTE, Corpus
from ops.training.voice.features import FRAME_RATE, NUM_BANDS
from ops.training.voice.talker import CODE_OFFSET, END, MOST_CODES, VOICE, prompt_of, speak
from ops.training.voice.task import WEIGHTS, WRONG_SHARE
from ops.training.voice.texts import Answer, Kind
from shared.protocol.chunks import ChunkSpec
from workers.generator.core.schedule import Window
from workers.generator.core.vocoder import Vocoder, cut
from workers.generator.loader import load_vocoder

FEWEST_CODES = 4
CARD = Path(__file__).with_name("card.md")
CODES_FILE, TEMPLATES_FILE = "demo_voice_codes.json", "demo_voice_templates.safetensors"
TEXTS = ("red", "circle", "yes", "left", "7", "W", "a red circle on blue")

Spoken = list[tuple[Answer, list[int]]]


def sound_of(vocoder: Vocoder, codes: Sequence[int]) -> NDArray[np.float32]:
    """Return the samples of a whole utterance; full scale is 1."""
    window = Window(0, 0, len(codes), len(codes))
    chunk = cut(vocoder, np.array(codes, np.int32)[:, None], window)
    (samples,) = vocoder.synthesize([chunk])
    return (samples / 32768).astype(np.float32)


def judge(score: Score, spoken: Spoken, corpus: Corpus, vocoder: Vocoder) -> Score:
    """Compare each answer with the recordings of all answers of its kind."""
    listeners: dict[Kind, Listener] = {}
    for answer, codes in spoken:
        if answer.kind not in listeners:
            listeners[answer.kind] = Listener(corpus.templates(answer.kind))
        text = None
        if len(codes) >= FEWEST_CODES:
            text = listeners[answer.kind].hear(sound_of(vocoder, codes), SAMPLE_RATE)
        score.add(answer.text, text or "nothing")
    console.log(str(score))
    return score


def load_talker(out: Path) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    model = Qwen2ForCausalLM.from_pretrained(out / "talker", dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(out / "talker")


def evaluate(out: Path, corpus: Corpus, cases: int, seed: int) -> list[Score]:
    model, tokenizer = load_talker(out)
    vocoder = load_vocoder(out, ChunkSpec(), "the voice")
    rng = random.Random(f"{seed}/judged")

    def chosen(kind: Kind, is_held_out: bool = False) -> Spoken:
        pairs = zip(corpus.answers, corpus.codes, strict=True)
        matches = [
            (answer, codes.tolist())
            for answer, codes in pairs
            if answer.kind == kind and answer.is_held_out == is_held_out
        ]
        return matches if len(matches) <= cases else rng.sample(matches, cases)

    def said(pairs: Spoken) -> Spoken:
        answers = [answer for answer, _ in pairs]
        prompts = [prompt_of(tokenizer, answer.text) for answer in answers]
        return list(zip(answers, speak(model, prompts), strict=True))

    short, sentences = chosen("short"), chosen("sentence")
    held_out, trained = chosen("description", True), chosen("description")
    plan = [
        (Score("recorded codes of short answers"), short),
        (Score("recorded codes of held-out descriptions"), held_out),
        (Score("short answers", 95.0), said(short)),
        (Score("sentences about itself"), said(sentences)),
        (Score("held-out descriptions", 90.0), said(held_out)),
        (Score("trained descriptions"), said(trained)),
    ]
    return [judge(score, spoken, corpus, vocoder) for score, spoken in plan if spoken]


def write_voice_card(
    out: Path, scores: Sequence[Score], corpus: Corpus, state: State, seed: int
) -> None:
    model = load_talker(out)[0]
    config: Any = model.config
    kinds = [answer.kind for answer in corpus.answers]
    write_card(
        out,
        CARD,
        num=f"{len(kinds):,}",
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        rate=FRAME_RATE,
        codes=NUM_CODES,
        bands=NUM_BANDS,
        offset=CODE_OFFSET,
        last_code=NUM_CODES - 1,
        last=CODE_OFFSET + NUM_CODES - 1,
        voice=VOICE,
        end=END,
        most=MOST_CODES,
        frame=SAMPLE_RATE // FRAME_RATE,
        samples=SAMPLE_RATE,
        short=kinds.count("short"),
        sentences=kinds.count("sentence"),
        descriptions=f"{kinds.count('description'):,}",
        held_out=sum(answer.is_held_out for answer in corpus.answers),
        cases=max(score.num_questions for score in scores),
        rows="\n".join(score.row for score in scores),
        verdict=verdict(scores),
        mistakes="\n".join(map(_mistakes, filter(lambda s: s.mistakes, scores))) or "- nothing",
        espeak=corpus.espeak,
        espeak_voice=ESPEAK_VOICE,
        speed=WORDS_A_MINUTE,
        minutes=sum(len(features.pitch) for features in corpus.features) / FRAME_RATE / 60,
        seed=seed,
        state=state,
        cpu=state.cpu_s / 60,
        wrong=WRONG_SHARE,
        short_weight=WEIGHTS["short"],
        sentence_weight=WEIGHTS["sentence"],
        often=FRAMES_COUNT["short"],
    )


def _mistakes(score: Score) -> str:
    texts = [f"  - {text} ({answer})" for text, answer in score.mistakes]
    more = f", the first 8 of {len(texts)}" if len(texts) > 8 else ""
    return "\n".join([f"- {score.name}{more}:", *texts[:8]])


def write_recorded(out: Path, corpus: Corpus, folder: Path) -> None:
    """Write the files that the tests compare the voice with: greedy codes and templates."""
    model, tokenizer = load_talker(out)
    codes = speak(model, [prompt_of(tokenizer, text) for text in TEXTS])
    rows = [f" {json.dumps(text)}: {row}" for text, row in zip(TEXTS, codes, strict=True)]
    joined = ",\n".join(rows)
    (folder / CODES_FILE).write_text(f"{{\n{joined}\n}}\n", encoding="utf-8")
    templates = corpus.templates("short")
    arrays = {text: rows.astype(np.float16) for text, rows in templates.items()}
    save_file(arrays, folder / TEMPLATES_FILE)
