"""The recorded answers with their features and codes, kept between the steps of the training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.training.seeing.scenes import console
from ops.training.voice.codec import make_table, save_table, train_codec
from ops.training.voice.features import Features, Floats, features_of
from ops.training.voice.listening import heard
from ops.training.voice.recording import RECORDED_RATE, espeak_version, record
from ops.training.voice.texts import Answer, Kind, answers

TOLD_EVERY = 400
# How often the frames of an answer count in the codec: single words have few frames, and nothing
# but them tells one letter from another.
FRAMES_COUNT: dict[Kind, int] = {"short": 9, "sentence": 1, "description": 1}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Every answer with what was measured of its recording, and its codes."""

    answers: list[Answer]
    features: list[Features]
    heard: list[Floats]
    codes: list[NDArray[np.int16]]
    espeak: str

    def templates(self, *kinds: Kind) -> dict[str, Floats]:
        """What the judge knows the answers of these kinds by."""
        pairs = zip(self.answers, self.heard, strict=True)
        return {answer.text: rows for answer, rows in pairs if answer.kind in kinds}


def record_all(only: Kind | None, folder: Path) -> None:
    """Records the answers and keeps their features; the samples are not kept."""
    spoken = [answer for answer in answers() if only in (None, answer.kind)]
    features, rows, start = [], [], time.process_time()
    for number, answer in enumerate(spoken, 1):
        wave = record(answer.text)
        features.append(features_of(wave))
        rows.append(heard(wave, RECORDED_RATE))
        if number % TOLD_EVERY == 0 or number == len(spoken):
            seconds = time.process_time() - start
            console.log(f"{number} of {len(spoken)} recorded in {seconds:.0f} s of CPU")
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "recorded.npz",
        espeak=np.array(espeak_version()),
        texts=np.array([answer.text for answer in spoken]),
        kinds=np.array([answer.kind for answer in spoken]),
        lengths=np.array([len(item.pitch) for item in features]),
        envelope=np.concatenate([item.envelope for item in features]),
        pitch=np.concatenate([item.pitch for item in features]),
        voicing=np.concatenate([item.voicing for item in features]),
        heard_lengths=np.array([len(item) for item in rows]),
        heard=np.concatenate(rows).astype(np.float16),
    )


def load_corpus(folder: Path) -> Corpus:
    with np.load(folder / "recorded.npz") as kept:
        espeak = str(kept["espeak"])
        spoken = [
            Answer(str(text), str(kind))  # type: ignore[arg-type]
            for text, kind in zip(kept["texts"], kept["kinds"], strict=True)
        ]
        cuts = np.cumsum(kept["lengths"])[:-1]
        parts = [np.split(kept[name], cuts) for name in ("envelope", "pitch", "voicing")]
        features = [Features(*part) for part in zip(*parts, strict=True)]
        heard_cuts = np.cumsum(kept["heard_lengths"])[:-1]
        rows = np.split(kept["heard"].astype(np.float32), heard_cuts)
    codes: list[NDArray[np.int16]] = []
    if (folder / "codes.npz").exists():
        with np.load(folder / "codes.npz") as kept:
            codes = np.split(kept["codes"], cuts)
    return Corpus(spoken, features, rows, codes, espeak)


def encode_all(folder: Path, out: Path, seed: int) -> None:
    """Trains the codec without the held-out answers, and writes all codes and the table."""
    corpus, start = load_corpus(folder), time.process_time()
    pairs = list(zip(corpus.answers, corpus.features, strict=True))
    often = [
        features
        for answer, features in pairs
        for _ in range(FRAMES_COUNT[answer.kind])
        if answer.kind != "description"
    ]
    others = [
        features
        for answer, features in pairs
        if answer.kind == "description" and not answer.is_held_out
    ]
    codec = train_codec(often, others, seed)
    console.log(f"codec trained in {time.process_time() - start:.0f} s of CPU")
    codes = [codec.codes_of(features) for features in corpus.features]
    np.savez(folder / "codes.npz", codes=np.concatenate(codes))
    out.mkdir(parents=True, exist_ok=True)
    trained = [
        (features, row)
        for answer, features, row in zip(corpus.answers, corpus.features, codes, strict=True)
        if not answer.is_held_out
    ]
    save_table(make_table(trained), out / "code2wav.safetensors")
    changes = np.mean([np.mean(row[1:] != row[:-1]) for row in codes])
    console.log(
        f"{sum(map(len, codes)):,} frames of {len(codes):,} answers, "
        f"{len(np.unique(np.concatenate(codes)))} codes in use, a change at {changes:.0%} of "
        f"frames; {time.process_time() - start:.0f} s of CPU"
    )
