"""Sounds that judge the model that hears. No program and no formula of the training made them.

flite speaks the digits, with voices that were cut from recordings of people. Beeps are plucked
strings, bells and chords.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ops.training.audio import FILE, Wave, record

RATE = 16_000
MAX_BEEPS = 5
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FLITE_VOICES = ("kal", "awb", "rms", "slt")


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    question: str
    answer: str
    wave: Wave
    source: str


def digit_cases(rng: np.random.Generator) -> list[Case]:
    """Return each digit by each voice at three speeds."""
    cases = []
    for voice in FLITE_VOICES:
        for stretch in (0.9, 1.0, 1.2):
            for digit, word in enumerate(WORDS):
                wave = _placed(rng, _speak(voice, stretch, word))
                cases.append(Case("digit", "Which digit is spoken?", str(digit), wave, voice))
    return cases


def beep_cases(rng: np.random.Generator, per_number: int) -> list[Case]:
    cases = []
    for number in range(1, MAX_BEEPS + 1):
        for i in range(per_number):
            high = bool(i % 2)
            timbre = ("string", "bell", "chord")[i % 3]
            wave = _placed(rng, _row(rng, timbre, number, high))
            level = "high" if high else "low"
            beeps = f"{number} {level} {'beep' if number == 1 else 'beeps'}"
            cases += [
                Case("count", "How many beeps do you hear?", str(number), wave, timbre),
                Case("level", "Are the beeps high or low?", level, wave, timbre),
                Case("description", "What do you hear?", beeps, wave, timbre),
            ]
    return cases


def _speak(voice: str, stretch: float, word: str) -> Wave:
    options = ("-voice", voice, "--setf", f"duration_stretch={stretch}")
    return record("flite", *options, "-t", word, "-o", FILE, rate=RATE)


def _row(rng: np.random.Generator, timbre: str, number: int, high: bool) -> Wave:
    hz = float(rng.uniform(1500, 3000) if high else rng.uniform(200, 450))
    step = int(RATE * rng.uniform(0.22, 0.45))
    sound = np.zeros(step * (number - 1) + int(RATE * 0.3), np.float32)
    for i in range(number):
        note = {"string": _string, "bell": _bell, "chord": _chord}[timbre](rng, hz)
        room = sound[i * step : i * step + len(note)]
        room += note[: len(room)]
    return sound


def _string(rng: np.random.Generator, hz: float) -> Wave:
    """A plucked string by Karplus and Strong: noise in a loop that loses its treble."""
    delay = max(2, round(RATE / hz))
    loop = rng.uniform(-1, 1, delay)
    out = np.empty(int(RATE * 0.18), np.float32)
    for i in range(len(out)):
        out[i] = loop[i % delay]
        loop[i % delay] = 0.494 * (loop[i % delay] + loop[(i + 1) % delay])
    return out * np.linspace(1, 0, len(out), dtype=np.float32)


def _bell(rng: np.random.Generator, hz: float) -> Wave:
    """Two sines of which one shakes the other, as in electric pianos."""
    time_s = np.arange(int(RATE * 0.2)) / RATE
    shake = rng.uniform(0.5, 2) * np.exp(-12 * time_s) * np.sin(2 * np.pi * 1.4 * hz * time_s)
    return np.asarray(np.sin(2 * np.pi * hz * time_s + shake) * np.exp(-14 * time_s), np.float32)


def _chord(rng: np.random.Generator, hz: float) -> Wave:
    """Two tones at once, as on a telephone's keys, with a tremor."""
    time_s = np.arange(int(RATE * rng.uniform(0.1, 0.18))) / RATE
    tones = np.sin(2 * np.pi * hz * time_s) + np.sin(2 * np.pi * 1.25 * hz * time_s)
    return np.asarray(tones * (1 + 0.3 * np.sin(50 * time_s)) * np.hanning(len(time_s)), np.float32)


def _placed(rng: np.random.Generator, wave: Wave) -> Wave:
    padded = np.pad(wave, (int(RATE * rng.uniform(0.05, 0.4)), int(RATE * 0.2)))
    padded *= rng.uniform(0.1, 0.8) / np.abs(padded).max()
    return np.asarray(padded + rng.normal(0, 10 ** rng.uniform(-4, -2.7), len(padded)), np.float32)
