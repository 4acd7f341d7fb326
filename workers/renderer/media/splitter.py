"""Splitter: cuts a long recording at quiet moments, so that no word is cut. Pure."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shared.models.mel_layout import SAMPLE_RATE

MAX_PIECE_S = 28.0
"""Longest piece; the models process 30 seconds at once."""
SEARCHED_S = 2.0
"""Part of the longest piece, before its end, that is searched for the quietest moment."""
MOMENT_S = 0.1

Samples = NDArray[np.float32]


def split_sound(parts: Iterator[Samples], window_s: float = MAX_PIECE_S) -> Iterator[Samples]:
    """Yield consecutive pieces of at most 28 seconds, or `window_s` if that is less."""
    max_len = int(SAMPLE_RATE * min(MAX_PIECE_S, window_s))
    rest = np.zeros(0, np.float32)
    for part in parts:
        rest = np.concatenate([rest, part])
        while len(rest) > max_len:
            cut = _find_quietest(rest[:max_len])
            yield rest[:cut]
            rest = rest[cut:]
    if len(rest):
        yield rest


def _find_quietest(samples: Samples) -> int:
    """Return the middle of the quietest moment near the end."""
    moment = int(SAMPLE_RATE * MOMENT_S)
    start = len(samples) - min(int(SAMPLE_RATE * SEARCHED_S), len(samples) // 2)
    energy = np.cumsum(np.square(samples[start:], dtype=np.float64))
    quietest = int(np.argmin(energy[moment:] - energy[:-moment]))
    return start + quietest + moment // 2
