"""Recorded answers with their features and codes, stored between the steps of the training."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.training.audio import FILE, Floats, Wave, record
from ops.training.judge.listening import heard
from ops.training.trainer import console
from ops.training.voice.codec import make_table, save_table, train_codec
from ops.training.voice.features import RECORDED_RATE, Features, features_of
from ops.training.voice.texts import Answer, Kind, answers

ESPEAK_VOICE = "en-us"
WORDS_A_MINUTE = 170
SILENCE = 0.003
LEAD_S, TAIL_S = 0.02, 0.04
LOG_EVERY = 400
# Weight of the frames of an answer in the codec. Single words have few frames, and only these
# distinguish one letter from another.
FRAMES_COUNT: dict[Kind, int] = {"short": 9, "sentence": 1, "description": 1}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Every answer with its codes and the measurements of its recording."""

    answers: list[Answer]
    features: list[Features]
    cepstra: list[Floats]
    codes: list[NDArray[np.int16]]
    espeak: str

    def templates(self, *kinds: Kind) -> dict[str, Floats]:
        """Return the judge's templates of the answers of these kinds."""
        pairs = zip(self.answers, self.cepstra, strict=True)
        return {answer.text: rows for answer, rows in pairs if answer.kind in kinds}


def espeak_version() -> str:
    command = ("espeak-ng", "--version")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return output.split("Data at")[0].split(":")[-1].strip()


def speak(text: str) -> Wave:
    """Return the text as espeak-ng speaks it, without the silence around it."""
    voice = ("-v", ESPEAK_VOICE, "-s", str(WORDS_A_MINUTE))
    samples = record("espeak-ng", *voice, "-w", FILE, text, rate=RECORDED_RATE)
    loud = np.flatnonzero(np.abs(samples) > SILENCE)
    first = max(0, int(loud[0]) - round(LEAD_S * RECORDED_RATE))
    last = int(loud[-1]) + round(TAIL_S * RECORDED_RATE)
    return samples[first:last]


def record_all(only: Kind | None, folder: Path) -> None:
    """Record the answers and store their features, without the samples."""
    spoken = [answer for answer in answers() if only in (None, answer.kind)]
    features, rows, start = [], [], time.process_time()
    for number, answer in enumerate(spoken, 1):
        wave = speak(answer.text)
        features.append(features_of(wave))
        rows.append(heard(wave, RECORDED_RATE))
        if number % LOG_EVERY == 0 or number == len(spoken):
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
    with np.load(folder / "recorded.npz") as stored:
        espeak = str(stored["espeak"])
        spoken = [
            Answer(str(text), str(kind))  # type: ignore[arg-type]
            for text, kind in zip(stored["texts"], stored["kinds"], strict=True)
        ]
        cuts = np.cumsum(stored["lengths"])[:-1]
        parts = [np.split(stored[name], cuts) for name in ("envelope", "pitch", "voicing")]
        features = [Features(*part) for part in zip(*parts, strict=True)]
        heard_cuts = np.cumsum(stored["heard_lengths"])[:-1]
        rows = np.split(stored["heard"].astype(np.float32), heard_cuts)
    codes: list[NDArray[np.int16]] = []
    if (folder / "codes.npz").exists():
        with np.load(folder / "codes.npz") as stored:
            codes = np.split(stored["codes"], cuts)
    return Corpus(spoken, features, rows, codes, espeak)


def encode_all(folder: Path, out: Path, seed: int) -> None:
    """Train the codec without the held-out answers, and write all codes and the table."""
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
