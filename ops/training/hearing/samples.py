"""Questions about sounds and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ops.training.audio import Wave
from ops.training.hearing import sounds
from ops.training.hearing.sounds import MAX_BEEPS
from ops.training.hearing.speech import Spoken, vary

TASKS = ("count", "level", "digit", "description", "nothing")
SHARES = (0.32, 0.12, 0.38, 0.15, 0.03)

WORDINGS = msgspec.yaml.decode(
    Path(__file__).with_name("wordings.yaml").read_bytes(), type=dict[str, tuple[str, ...]]
)
NO_SOUND = "I hear no sound."


@dataclass(frozen=True, slots=True)
class Sample:
    task: str
    question: str
    answer: str
    wave: Wave | None
    label: int = -1
    """Class of the sound for the classifier: the digit, or 10 and more for beeps."""
    is_sound_first: bool = True


def describe_beeps(number: int, high: bool) -> str:
    return f"{number} {'high' if high else 'low'} beep{'s' * (number > 1)}"


def draw_sample(rng: np.random.Generator, bank: Sequence[Spoken]) -> Sample:
    task = str(rng.choice(TASKS, p=SHARES))
    first = bool(rng.random() < 0.85)
    if task == "nothing":
        wordings = WORDINGS[str(rng.choice(list(WORDINGS)))]
        return Sample(task, str(rng.choice(wordings)), NO_SOUND, None)
    question = str(rng.choice(WORDINGS[task]))
    if task == "digit" or (task == "description" and rng.random() < 0.5):
        spoken = bank[int(rng.integers(len(bank)))]
        answer = str(spoken.digit) if task == "digit" else f"the digit {spoken.digit}"
        wave = sounds.in_a_room(rng, vary(rng, spoken.wave))
        return Sample(task, question, answer, wave, spoken.digit, first)
    number, high = int(rng.integers(1, MAX_BEEPS + 1)), bool(rng.random() < 0.5)
    answers = {
        "count": str(number),
        "level": "high" if high else "low",
        "description": describe_beeps(number, high),
    }
    wave = sounds.in_a_room(rng, sounds.beeps(rng, number, high))
    label = 10 + 2 * (number - 1) + high
    return Sample(task, question, answers[task], wave, label, first)
