"""Sounds of the training: beeps, digits that espeak-ng has spoken, and what a room does to both."""

from __future__ import annotations

import subprocess
import tempfile
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

RATE = 16_000
MAX_BEEPS = 5
LOW_HZ, HIGH_HZ = (180.0, 520.0), (1300.0, 3400.0)
MAX_S = 3.6

Wave = NDArray[np.float32]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LOCALES = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd")
_VARIANTS = """
f1 f2 f3 f4 f5 m1 m2 m3 m4 m5 m6 m7 m8 klatt klatt2 klatt3 klatt4 klatt6 Alex Alicia Andrea Andy
Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Michael Mike adam anika announcer
antonio aunty belinda benjamin boris caleb david ed edward edward2 gustave iven iven2 iven3 john
kaukovalta linda max michel miguel norbert pablo paul pedro quincy rob robert sandro shelby steph
steph2 travis victor zac
"""
VARIANTS = tuple(_VARIANTS.split())


@dataclass(frozen=True, slots=True)
class Spoken:
    digit: int
    wave: Wave


def record_digits(rng: np.random.Generator, num_rounds: int) -> list[Spoken]:
    """Every digit in every variant of espeak-ng, as often as there are rounds."""
    orders = []
    for _ in range(num_rounds):
        for variant in VARIANTS:
            for digit in range(10):
                voice = f"{rng.choice(LOCALES)}+{variant}"
                speed, pitch = int(rng.integers(110, 210)), int(rng.integers(15, 85))
                text = WORDS[digit] + str(rng.choice(["", ".", "?", "!", ","]))
                orders.append((digit, ("-v", voice, "-s", str(speed), "-p", str(pitch), text)))
    with ThreadPoolExecutor(2) as pool:
        waves = pool.map(_speak, (arguments for _, arguments in orders))
        pairs = zip(orders, waves, strict=True)
        return [Spoken(digit, trim(wave)) for (digit, _), wave in pairs]


def _speak(arguments: Sequence[str]) -> Wave:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speech.wav"
        subprocess.run(["espeak-ng", "-w", str(file), *arguments], check=True)
        return read_wave(file)


def read_wave(file: Path) -> Wave:
    """The first channel of a WAV file of 16 bits, at our rate."""
    with wave.open(str(file)) as recording:
        pcm = np.frombuffer(recording.readframes(recording.getnframes()), "<i2")
        samples = pcm[:: recording.getnchannels()].astype(np.float32) / 32768
        return np.asarray(soxr.resample(samples, recording.getframerate(), RATE), np.float32)


def trim(samples: Wave, threshold: float = 0.01) -> Wave:
    """The samples without the silence around them."""
    loud = np.flatnonzero(np.abs(samples) > threshold * np.abs(samples).max())
    return samples[max(0, loud[0] - 160) : loud[-1] + 320]


def beeps(rng: np.random.Generator, number: int, high: bool) -> Wave:
    """Equal beeps with pauses between them."""
    low_hz, high_hz = HIGH_HZ if high else LOW_HZ
    hz = np.exp(rng.uniform(np.log(low_hz), np.log(high_hz)))
    longest = min(0.45, 2.6 / number * 0.5)
    length_s, pause_s = rng.uniform(0.07, longest), rng.uniform(0.08, longest)
    # Half of the rows have the spectrum of no common waveform.
    partials = _partials(rng) if rng.random() < 0.5 else None
    kind = rng.integers(5)
    parts = []
    for _ in range(number):
        own_s = length_s * rng.uniform(0.9, 1.1)
        beep = _beep(rng, hz, own_s, int(kind)) if partials is None else _ring(hz, own_s, partials)
        parts.append(beep)
        parts.append(np.zeros(int(RATE * pause_s * rng.uniform(0.85, 1.25)), np.float32))
    return np.concatenate(parts[:-1])


def _beep(rng: np.random.Generator, hz: float, length_s: float, kind: int) -> Wave:
    time_s = np.arange(int(RATE * length_s)) / RATE
    phase = time_s * hz * (1 + 0.01 * rng.normal())
    match kind:
        case 0:
            tone = np.sin(2 * np.pi * phase)
        case 1:
            tone = np.sign(np.sin(2 * np.pi * phase))
        case 2:
            tone = 2 * (phase % 1) - 1
        case 3:
            tone = 4 * np.abs(phase % 1 - 0.5) - 1
        case _:
            overtones = np.arange(1, 5)[:, None]
            tone = (np.sin(2 * np.pi * overtones * phase) / overtones**2).sum(axis=0)
    rise_s, decay = rng.uniform(0.002, 0.02), rng.uniform(0, 6) * (rng.random() < 0.5)
    edge = np.minimum(1, np.minimum(time_s, length_s - time_s) / rise_s)
    return np.asarray(tone * edge.clip(0) * np.exp(-decay * time_s / length_s), np.float32)


def _partials(rng: np.random.Generator) -> NDArray[np.float64]:
    """Ratios, loudness, phases and decays of partials, which need not be whole multiples."""
    number = int(rng.integers(2, 13))
    ratios = np.arange(1, number + 1) * (1 + rng.random() * 0.15 * rng.random(number))
    loudness = rng.random(number) * np.arange(1, number + 1) ** -rng.uniform(0, 1.5)
    loudness[0] = max(loudness[0], 0.1 * loudness.max())
    decays = rng.uniform(0, 6) + rng.uniform(0, 1.5) * np.arange(number)
    ratios[0] = 1
    return np.stack([ratios, loudness, rng.random(number), decays])[..., None]


def _ring(hz: float, length_s: float, partials: NDArray[np.float64]) -> Wave:
    """A tone of partials that fade."""
    time_s = np.arange(int(RATE * length_s)) / RATE
    ratios, loudness, phases, decays = partials
    loudness = loudness * (ratios * hz < 0.45 * RATE)
    waves = np.sin(2 * np.pi * (ratios * hz * time_s + phases))
    tone = (loudness * waves * np.exp(-decays * time_s / length_s)).sum(axis=0)
    edge = np.minimum(1, np.minimum(time_s, length_s - time_s) / 0.005)
    return np.asarray(tone * edge.clip(0) / np.abs(tone).max(), np.float32)


def change_speed(samples: Wave, factor: float) -> Wave:
    """Faster, and with all frequencies higher by the same factor."""
    places = np.arange(0, len(samples) - 1, factor)
    return np.asarray(np.interp(places, np.arange(len(samples)), samples), np.float32)


def in_a_room(rng: np.random.Generator, samples: Wave, loudness: float = 1.0) -> Wave:
    """The sound with silence around it, an echo, other loudness of treble and bass, and noise."""
    before, after = rng.uniform(0.02, 0.5, 2)
    padded: NDArray[Any]
    padded = np.pad(samples, (int(RATE * before), int(RATE * after)))[: int(RATE * MAX_S)]
    if rng.random() < 0.3:
        tail = int(RATE * rng.uniform(0.03, 0.2))
        echo = rng.normal(0, 1, tail) * np.exp(-5 * np.arange(tail) / tail)
        echo[0] = rng.uniform(3, 12)
        padded = _filter(padded, echo)
    if rng.random() < 0.5:
        gains = np.exp(rng.normal(0, 0.7, 6))
        spectrum = np.fft.rfft(padded)
        at = np.linspace(0, 5, len(spectrum))
        spectrum *= np.interp(at, np.arange(6), gains)
        if rng.random() < 0.3:  # as on a telephone
            spectrum[int(len(spectrum) * rng.uniform(0.4, 0.7)) :] *= 0.01
        padded = np.fft.irfft(spectrum, len(padded))
    peak = rng.uniform(0.03, 0.9) * loudness
    padded = padded / max(1e-6, float(np.abs(padded).max())) * peak
    noise = rng.normal(0, 1, len(padded))
    if rng.random() < 0.5:
        noise = _filter(noise, np.exp(-np.arange(8) / rng.uniform(0.5, 4)))
    level = peak * 10 ** (-rng.uniform(12, 60) / 20) * 0.3
    return np.asarray(padded + noise / noise.std() * level, np.float32)


def _filter(samples: NDArray[Any], kernel: NDArray[Any]) -> NDArray[np.float64]:
    length = len(samples) + len(kernel)
    product = np.fft.rfft(samples, length) * np.fft.rfft(kernel, length)
    return np.asarray(np.fft.irfft(product, length)[: len(samples)])
