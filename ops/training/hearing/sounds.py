"""Beeps of the training, and the effects of a room on all sounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.training.audio import Wave

RATE = 16_000
MAX_BEEPS = 5
LOW_HZ, HIGH_HZ = (180.0, 520.0), (1300.0, 3400.0)
MAX_S = 3.6


def beeps(rng: np.random.Generator, number: int, high: bool) -> Wave:
    """Equal beeps with pauses between them."""
    low_hz, high_hz = HIGH_HZ if high else LOW_HZ
    hz = np.exp(rng.uniform(np.log(low_hz), np.log(high_hz)))
    # Most rows have the spectrum of no common waveform.
    if rng.random() < 0.7:
        return _row_of_tones(rng, hz, number)
    longest = min(0.45, 2.6 / number * 0.5)
    length_s, pause_s = rng.uniform(0.07, longest), rng.uniform(0.08, longest)
    kind = int(rng.integers(5))
    parts = []
    for _ in range(number):
        parts.append(_beep(rng, hz, length_s * rng.uniform(0.9, 1.1), kind))
        parts.append(np.zeros(int(RATE * pause_s * rng.uniform(0.85, 1.25)), np.float32))
    return np.concatenate(parts[:-1])


def _row_of_tones(rng: np.random.Generator, hz: float, number: int) -> Wave:
    """Return a repeated tone, which may overlap the next repetition."""
    step_s = rng.uniform(0.15, min(0.6, 2.6 / number))
    length_s = min(0.6, step_s * rng.uniform(0.3, 1.3))
    # A long tone must fade before the next one, or the tones could not be counted.
    slowest = 0.0 if length_s < step_s - 0.06 else 3.0 / step_s
    note = _tone(rng, hz, length_s, slowest)
    uneven = rng.uniform(0, 0.08) if rng.random() < 0.5 else 0.0
    starts = np.cumsum(step_s * (1 + uneven * rng.uniform(-1, 1, number)))
    starts = ((starts - starts[0]) * RATE).astype(int)
    row = np.zeros(starts[-1] + len(note), np.float32)
    for start in starts:
        row[start : start + len(note)] += note * rng.uniform(0.6, 1)
    return row


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


def _tone(rng: np.random.Generator, hz: float, length_s: float, slowest: float = 0.0) -> Wave:
    """A tone of partials that rise and fade, whose partials fade by `slowest` or more a second."""
    time_s = np.arange(int(RATE * length_s)) / RATE
    ratios, loudness = _partials(rng, hz)
    fade = slowest + rng.uniform(0, 30) * (rng.random() < 0.7)
    # High partials fade as fast as low ones, or up to some ten times as fast.
    fades = fade * (1 + rng.uniform(0, 2) * (rng.random() < 0.7) * (ratios - 1) * hz / 1000)
    bend = np.zeros(len(time_s))
    if rng.random() < 0.25:
        rate, depth = rng.uniform(3, 9), rng.uniform(0, 0.025)
        bend = depth * np.sin(2 * np.pi * (rate * time_s + rng.random()))
    if rng.random() < 0.15:
        bend = bend + rng.uniform(-0.06, 0.06) * np.exp(-time_s / rng.uniform(0.01, 0.1))
    phase = np.cumsum(hz * (1 + bend)) / RATE
    turns = ratios[:, None] * phase + rng.random(len(ratios))[:, None]
    waves = np.sin(2 * np.pi * (turns % 1).astype(np.float32))
    faded = np.exp(-fades[:, None] * time_s).astype(np.float32)
    sound = np.einsum("p,pt,pt->t", loudness.astype(np.float32), waves, faded)
    sound = sound / np.abs(sound).max()
    if rng.random() < 0.4:
        sound = sound + _strike(rng, len(sound))
    return np.asarray(sound * _edges(rng, time_s, length_s), np.float32)


def _partials(rng: np.random.Generator, hz: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ratios and loudness of partials, which need not be whole multiples, up to the treble."""
    most = max(1, int(0.45 * RATE / hz))
    number = int(min(most, 40, 1 + np.exp(rng.uniform(0, np.log(40)))))
    whole = np.arange(1, number + 1)
    match rng.integers(4):
        case 0 | 1:
            ratios = whole.astype(float)
        case 2:  # stiff strings and bars
            stiffness = rng.uniform(0, 0.02)
            ratios = whole * np.sqrt((1 + stiffness * whole**2) / (1 + stiffness))
        case _:  # bells and plates
            ratios = 1 + np.cumsum(np.append(0, rng.uniform(0.15, 1.6, number - 1)))
    loudness = whole ** -rng.uniform(-0.2, 2) * np.exp(rng.normal(0, rng.uniform(0, 1.2), number))
    if rng.random() < 0.3:  # struck or blown at a place where some partials rest
        loudness = loudness * (0.05 + np.abs(np.sin(np.pi * whole * rng.uniform(0.05, 0.5))))
    # Other tones have no pitch without their lowest partial.
    if number > 3 and ratios[1] == 2 and rng.random() < 0.3:
        loudness[0] *= rng.uniform(0, 0.4)
    else:
        loudness[0] = max(loudness[0], 0.15 * loudness.max())
    return ratios, loudness * (ratios * hz < 0.47 * RATE)


def _strike(rng: np.random.Generator, length: int) -> NDArray[Any]:
    """Return the noise of a strike or a breath at the beginning of a tone."""
    noise = rng.normal(0, 1, length)
    if rng.random() < 0.6:
        noise = np.convolve(noise, np.exp(-np.arange(16) / rng.uniform(0.5, 6)), "same")
    fading = np.exp(-np.arange(length) / (RATE * rng.uniform(0.002, 0.03)))
    return np.asarray(rng.uniform(0, 1) * noise / (2 * noise.std()) * fading)


def _edges(rng: np.random.Generator, time_s: NDArray[Any], length_s: float) -> NDArray[Any]:
    """Return the loudness at both ends of a tone: sudden, or as slow as half of its length."""
    slow = rng.random() < 0.25
    rise_s = rng.uniform(0.1, 0.5) * length_s if slow else rng.uniform(0.001, 0.015)
    fall_s = rng.uniform(0.1, 0.5) * length_s if slow else rng.uniform(0.003, 0.03)
    edges = np.minimum(1, np.minimum(time_s / rise_s, (length_s - time_s) / fall_s)).clip(0)
    return edges if rng.random() < 0.5 else (1 - np.cos(np.pi * edges)) / 2


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
    if rng.random() < 0.6:
        padded = _colored(rng, padded)
    peak = rng.uniform(0.03, 0.9) * loudness
    padded = padded / max(1e-6, float(np.abs(padded).max())) * peak
    noise = rng.normal(0, 1, len(padded))
    if rng.random() < 0.5:
        noise = _filter(noise, np.exp(-np.arange(8) / rng.uniform(0.5, 4)))
    level = peak * 10 ** (-rng.uniform(12, 60) / 20) * 0.3
    return np.asarray(padded + noise / noise.std() * level, np.float32)


def _colored(rng: np.random.Generator, samples: NDArray[Any]) -> NDArray[Any]:
    """The sound with other loudness of treble and bass, and at times without some frequencies."""
    length = _fast_length(len(samples))
    spectrum = np.fft.rfft(samples, length)
    hz = np.linspace(0, RATE / 2, len(spectrum))
    octaves = np.log2(np.maximum(hz, 50) / 1000)
    db = np.interp(octaves, np.linspace(-3, 3, 8), rng.normal(0, 5, 8))
    db += octaves * rng.uniform(-4, 4)
    if rng.random() < 0.3:  # as on a telephone
        db[hz > rng.uniform(2800, 6000)] -= 40
    if rng.random() < 0.3:
        masked_hz = rng.uniform(500, 7000)
        db[(hz > masked_hz) & (hz < masked_hz * rng.uniform(1.05, 1.3))] -= 30
    return np.asarray(np.fft.irfft(spectrum * 10 ** (db / 20), length)[: len(samples)])


def _filter(samples: NDArray[Any], kernel: NDArray[Any]) -> NDArray[np.float64]:
    length = _fast_length(len(samples) + len(kernel))
    product = np.fft.rfft(samples, length) * np.fft.rfft(kernel, length)
    return np.asarray(np.fft.irfft(product, length)[: len(samples)])


def _fast_length(length: int) -> int:
    """The length or a bit more, of small factors: transforms of prime lengths take long."""
    return -(-length // 2048) * 2048
