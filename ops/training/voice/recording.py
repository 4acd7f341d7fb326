"""Recordings of the answers by espeak-ng, a program that only the training needs."""

from __future__ import annotations

import subprocess
import tempfile
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# espeak-ng writes 22,050 samples a second; a frame of 20 ms is a whole number of them.
RECORDED_RATE = 22050
ESPEAK_VOICE = "en-us"
WORDS_A_MINUTE = 170
SILENCE = 0.003
LEAD_S, TAIL_S = 0.02, 0.04

Wave = NDArray[np.float32]


def espeak_version() -> str:
    told = subprocess.run(["espeak-ng", "--version"], check=True, capture_output=True, text=True)
    return told.stdout.split("Data at")[0].split(":")[-1].strip()


def record(text: str) -> Wave:
    """The text as espeak-ng speaks it, without the silence around it; full scale is 1."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speech.wav"
        voice = ("-v", ESPEAK_VOICE, "-s", str(WORDS_A_MINUTE))
        subprocess.run(["espeak-ng", *voice, "-w", str(file), text], check=True)
        with wave.open(str(file)) as recording:
            assert recording.getframerate() == RECORDED_RATE
            pcm = recording.readframes(recording.getnframes())
    samples = np.asarray(np.frombuffer(pcm, "<i2") / 32768, np.float32)
    loud = np.flatnonzero(np.abs(samples) > SILENCE)
    first = max(0, int(loud[0]) - round(LEAD_S * RECORDED_RATE))
    last = int(loud[-1]) + round(TAIL_S * RECORDED_RATE)
    return samples[first:last]
