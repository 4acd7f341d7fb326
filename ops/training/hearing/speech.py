"""Spoken digits of the training, by espeak-ng and SVOX Pico, and variations of their sound."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.training.audio import FILE, Wave, record
from ops.training.hearing.sounds import RATE, change_speed

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LOCALES = (
    "en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd",
    "en-us-nyc", "en-029",
)  # fmt: skip
_VARIANTS = """
f1 f2 f3 f4 f5 m1 m2 m3 m4 m5 m6 m7 m8 klatt klatt2 klatt3 klatt4 klatt5 klatt6 Alex Alicia Andrea
Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Michael Mike Nguyen adam anika
announcer antonio aunty belinda benjamin boris caleb david ed edward edward2 grandma grandpa gustave
iven iven2 iven3 iven4 john kaukovalta linda marcelo max michel miguel norbert pablo paul pedro
quincy rob robert sandro shelby steph steph2 steph3 travis victor zac
"""
VARIANTS = tuple(_VARIANTS.split())
PICO_VOICES = ("en-GB", "en-US")
PICO_ROUNDS = 20
"""Recordings of a digit by each voice of Pico for one by each variant of espeak-ng.

Pico's two voices were learned from people and sound unlike espeak-ng. With this number they are a
third of all recordings.
"""
ENDINGS = ("", ".", "?", "!", ",")


@dataclass(frozen=True, slots=True)
class Spoken:
    digit: int
    wave: Wave


def record_digits(rng: np.random.Generator, num_rounds: int) -> list[Spoken]:
    """Return every digit in every voice, `num_rounds` times with other speeds and pitches."""
    orders = []
    for _ in range(num_rounds):
        for variant in VARIANTS:
            for digit in range(10):
                voice = f"{rng.choice(LOCALES)}+{variant}"
                speed, pitch = int(rng.integers(95, 240)), int(rng.integers(5, 95))
                text = WORDS[digit] + str(rng.choice(ENDINGS))
                orders.append((digit, ("-v", voice, "-s", str(speed), "-p", str(pitch), text)))
    with ThreadPoolExecutor(2) as pool:
        waves = pool.map(_espeak, (arguments for _, arguments in orders))
        pairs = zip(orders, waves, strict=True)
        spoken = [Spoken(digit, trim(wave)) for (digit, _), wave in pairs]
    return spoken + _pico(rng, num_rounds * PICO_ROUNDS)


def _espeak(arguments: Sequence[str]) -> Wave:
    return record("espeak-ng", "-w", FILE, *arguments, rate=RATE)


def _pico(rng: np.random.Generator, num_rounds: int) -> list[Spoken]:
    # Imported here: the product and its tests use other parts of this package without it.
    pico: Any = importlib.import_module("py_nanotts").NanoTTS()
    spoken = []
    for _ in range(num_rounds):
        for voice in PICO_VOICES:
            for digit, word in enumerate(WORDS):
                speed, pitch = rng.uniform(0.7, 1.4), rng.uniform(0.65, 1.5)
                text = word + str(rng.choice(ENDINGS))
                pcm = np.frombuffer(pico.speak(text, voice=voice, speed=speed, pitch=pitch), "<i2")
                spoken.append(Spoken(digit, trim(np.asarray(pcm / 32768, np.float32))))
    return spoken


def trim(samples: Wave, threshold: float = 0.01) -> Wave:
    """The samples without the silence around them."""
    loud = np.flatnonzero(np.abs(samples) > threshold * np.abs(samples).max())
    return samples[max(0, loud[0] - 160) : loud[-1] + 320]


def vary(rng: np.random.Generator, samples: Wave) -> Wave:
    """Return the speech of another mouth: length of the throat, tempo, breath and distortion."""
    varied = change_speed(samples, float(rng.uniform(0.82, 1.22)))
    if rng.random() < 0.5:
        varied = stretch(varied, float(rng.uniform(0.75, 1.35)))
    if rng.random() < 0.3:
        breath = np.convolve(np.abs(varied), np.full(160, 1 / 160), "same")
        breath *= rng.normal(0, 1, len(varied)) * rng.uniform(0.05, 0.5)
        varied = varied + np.diff(breath, prepend=0)
    if rng.random() < 0.2:
        drive = rng.uniform(1, 6) / np.abs(varied).max()
        varied = np.tanh(drive * varied)
    return np.asarray(varied, np.float32)


def stretch(samples: Wave, factor: float) -> Wave:
    """The samples slower by a factor and at the same pitch: windows overlap where they agree."""
    size, hop, reach = RATE // 32, RATE // 64, RATE // 125
    window = np.hanning(size + 1)[:size]
    num_windows = max(1, int((len(samples) * factor - size) / hop))
    source: NDArray[Any] = np.pad(samples, (reach, size + 2 * reach))
    out = np.zeros(num_windows * hop + size)
    at = reach
    for i in range(num_windows):
        out[i * hop : i * hop + size] += window * source[at : at + size]
        follows = source[at + hop : at + hop + size]
        ideal = reach + int((i + 1) * hop / factor)
        if ideal + size + reach > len(source):
            break
        around = source[ideal - reach : ideal + reach + size]
        at = ideal - reach + int(np.argmax(np.correlate(around, follows, "valid")[: 2 * reach]))
    return np.asarray(out, np.float32)
