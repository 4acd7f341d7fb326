"""A plain vocoder on arrays, with which the training judges the talker.

The product has its own, which makes the same sound in pieces of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.demo_voice.training.codec import SAMPLE_RATE
from ops.demo_voice.training.features import FRAME_RATE

Doubles = NDArray[np.float64]

STEPS_A_FRAME = 4
STEP = SAMPLE_RATE // FRAME_RATE // STEPS_A_FRAME
WINDOW, FFT = 4 * STEP, 1024
# Breath: above this frequency a part of voiced sound is noise as well.
BREATH_HZ, BREATH_WIDTH_HZ, MOST_BREATH = 3500.0, 2500.0, 0.6


class Vocoder:
    """Pulses and noise, shaped by the envelope of each code."""

    def __init__(self, table: Mapping[str, NDArray[Any]]) -> None:
        hz = np.arange(FFT // 2 + 1) * SAMPLE_RATE / FFT
        rows = table["envelope"].astype(np.float64)
        bands = table["band_hz"].astype(np.float64)
        self.envelope = np.stack([np.interp(hz, bands, row) for row in rows])
        self.pitch = table["pitch"].astype(np.float64)
        self.voicing = table["voicing"].astype(np.float64)
        self.breath = np.clip((hz - BREATH_HZ) / BREATH_WIDTH_HZ, 0, MOST_BREATH)

    def speak(self, codes: Sequence[int]) -> NDArray[np.float32]:
        """The samples of a whole utterance, 480 for each code; full scale is 1."""
        envelope, pitch, voicing = self.controls(np.asarray(codes, np.int64))
        pulses = shaped_frames(self.pulses(pitch))
        noise = shaped_frames(np.random.default_rng(0).standard_normal(len(pitch) * STEP))
        tonal = voicing[:, None] * (1 - self.breath)
        spectrum = np.exp(envelope) * (np.sqrt(tonal) * pulses + np.sqrt(1 - tonal) * noise)
        pieces = np.roll(np.fft.irfft(spectrum, FFT, axis=1), (FFT - WINDOW) // 2, axis=1)
        out = np.zeros(len(pieces) * STEP + FFT)
        for number, piece in enumerate(pieces):
            out[number * STEP : number * STEP + FFT] += piece
        start = (FFT - STEP) // 2
        # Hann windows of four steps add up to 2.
        speech = out[start : start + len(pieces) * STEP] / (WINDOW / STEP / 2)
        return np.asarray(np.clip(speech, -1, 1), np.float32)

    def controls(self, codes: NDArray[np.int64]) -> tuple[Doubles, Doubles, Doubles]:
        """Envelope, pitch and voicing of each step, between those of the neighbouring frames."""
        at = (np.arange(len(codes) * STEPS_A_FRAME) + 0.5) / STEPS_A_FRAME - 0.5
        left = np.clip(np.floor(at).astype(int), 0, len(codes) - 1)
        right = np.minimum(left + 1, len(codes) - 1)
        part = np.clip(at - left, 0, 1)
        a, b = codes[left], codes[right]
        envelope = (1 - part)[:, None] * self.envelope[a] + part[:, None] * self.envelope[b]
        voicing = (1 - part) * self.voicing[a] + part * self.voicing[b]
        first, second = self.pitch[a], self.pitch[b]
        both = (first > 0) & (second > 0)
        pitch = np.where(both, (1 - part) * first + part * second, np.maximum(first, second))
        return envelope, np.where(voicing > 0.3, pitch, 0), voicing * (voicing > 0.3)

    def pulses(self, pitch: Doubles) -> Doubles:
        """A band-limited pulse train of variance 1 where there is a pitch."""
        hz = np.repeat(pitch, STEP)
        phase = np.cumsum(np.where(hz > 0, hz, 100.0)) / SAMPLE_RATE
        harmonics = np.floor(0.5 * SAMPLE_RATE / np.maximum(hz, 60.0))
        half = np.pi * (phase % 1.0)
        below = np.sin(half)
        is_peak = np.abs(below) < 1e-6
        kernel = np.sin((2 * harmonics + 1) * half) / np.where(is_peak, 1.0, below)
        kernel = np.where(is_peak, 2 * harmonics + 1, kernel) - 1
        train = kernel * np.sqrt(np.maximum(hz, 60.0) / SAMPLE_RATE)
        return np.asarray(train * (hz > 0), np.float64)


def shaped_frames(excitation: Doubles) -> NDArray[np.complex128]:
    """Spectra of windows around the middles of all steps."""
    side = (WINDOW - STEP) // 2
    padded = np.pad(excitation, (side, WINDOW))
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::STEP]
    hann = np.hanning(WINDOW + 1)[:WINDOW]
    num_steps = len(excitation) // STEP
    return np.asarray(np.fft.rfft(windows[:num_steps] * hann, FFT, axis=1), np.complex128)
