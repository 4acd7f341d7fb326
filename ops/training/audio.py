"""Recordings of speech programs, and frequencies on the mel scale."""

from __future__ import annotations

import subprocess
import tempfile
import wave
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray

Wave = NDArray[np.float32]
Floats = NDArray[np.float32]
FILE = "FILE"
"""Stands for the file to write among the arguments of a program."""


def record(*command: str, rate: int) -> Wave:
    """Return the first channel of the sound that a program writes; full scale is 1."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speech.wav"
        arguments = [str(file) if argument == FILE else argument for argument in command]
        subprocess.run(arguments, check=True)
        with wave.open(str(file)) as recording:
            pcm = np.frombuffer(recording.readframes(recording.getnframes()), "<i2")
            samples = pcm[:: recording.getnchannels()].astype(np.float32) / 32768
            recorded_rate = recording.getframerate()
    if recorded_rate == rate:
        return np.asarray(samples, np.float32)
    return np.asarray(soxr.resample(samples, recorded_rate, rate), np.float32)


def mel_points(num: int, lowest_hz: float, highest_hz: float) -> NDArray[np.float64]:
    """Return frequencies in Hz that are evenly spaced on the mel scale."""
    lowest, highest = (2595 * np.log10(1 + hz / 700) for hz in (lowest_hz, highest_hz))
    points = 700 * (10 ** (np.linspace(lowest, highest, num) / 2595) - 1)
    return np.asarray(points, np.float64)


def mel_matrix(
    points: NDArray[np.float64], rate: float, fft: int, fewest_hz: float = 0.0
) -> Floats:
    """Return triangles between neighbouring points, as rows of weights that each add up to 1."""
    hz = np.arange(fft // 2 + 1) * rate / fft
    edges = np.concatenate([[2 * points[0] - points[1]], points, [2 * points[-1] - points[-2]]])
    left = np.maximum(edges[1:-1] - edges[:-2], fewest_hz)[:, None]
    right = np.maximum(edges[2:] - edges[1:-1], fewest_hz)[:, None]
    away = hz[None] - points[:, None]
    weights = np.maximum(0, np.minimum(1 + away / left, 1 - away / right))
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)
