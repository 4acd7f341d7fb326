"""Judge of speech: finds the recording that is nearest by time warping over its own cepstra.

It shares neither features nor codes with the codec and the talker. Its templates are recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ops.training.audio import Floats, mel_matrix, mel_points

STEP_S, WINDOW_S = 0.01, 0.025
NUM_BANDS, LOWEST_HZ, HIGHEST_HZ = 40, 80.0, 8000.0
NUM_CEPSTRA = 13
FFT = 1024
# Frames quieter than this, in nepers below the loudest, are silence.
QUIET = 5.0
# The shorter one of two utterances that are alike has at least this part of the length.
LEAST_LIKE_IN_LENGTH = 0.6
# Every third frame is enough to find the 60 nearest texts.
COARSE, FEW = 3, 60


def heard(wave: NDArray[np.float32], rate: int) -> Floats:
    """Return cepstra of an utterance: a row for every 10 ms that is not silent."""
    size = round(WINDOW_S * rate)
    starts = np.round(np.arange(0, len(wave) / rate, STEP_S) * rate).astype(int)
    padded = np.pad(wave, (size // 2, size))
    windows = padded[starts[:, None] + np.arange(size)] * np.hamming(size)
    power = np.abs(np.fft.rfft(windows, FFT, axis=1)) ** 2
    bands = mel_matrix(mel_points(NUM_BANDS, LOWEST_HZ, HIGHEST_HZ), rate, FFT)
    loudness = 0.5 * np.log(power @ bands.T + 1e-6)
    angles = np.pi / NUM_BANDS * np.outer(np.arange(1, NUM_CEPSTRA), np.arange(NUM_BANDS) + 0.5)
    rows = loudness @ (np.cos(angles).T * np.sqrt(2 / NUM_BANDS))
    level = loudness.mean(axis=1)
    rows = rows[level > level.max() - QUIET]
    return np.asarray(rows - rows.mean(axis=0), np.float32)


def warped_distances(rows: Floats, templates: Sequence[Floats]) -> NDArray[np.float64]:
    """Return the cost of the best warp onto each template, for each row of both.

    The table of all warps is filled along its diagonals, whose cells do not depend on one another.
    """
    num_rows, longest = len(rows), max(len(template) for template in templates)
    stacked = np.zeros((longest, len(templates), rows.shape[1]), np.float32)
    for number, template in enumerate(templates):
        stacked[: len(template), number] = template
    squares = (rows**2).sum(1)[:, None, None] + (stacked**2).sum(2)[None]
    products = np.tensordot(rows, stacked, axes=(1, 2))
    distance = np.sqrt(np.maximum(squares - 2 * products, 0))
    lengths = np.array([len(template) for template in templates])
    cost = np.full(len(templates), np.inf)
    # By rows. Every warp begins at one more row in front.
    before = np.full((num_rows + 1, len(templates)), np.inf, np.float32)
    last = before.copy()
    before[0] = 0.0
    for diagonal in range(num_rows + longest - 1):
        first, end = max(0, diagonal - longest + 1), min(num_rows, diagonal + 1)
        inside = np.arange(first, end)
        least = np.minimum(np.minimum(last[inside], last[inside + 1]), before[inside])
        here = np.full_like(last, np.inf)
        here[inside + 1] = least + distance[inside, diagonal - inside]
        ended = lengths == diagonal - num_rows + 2
        cost[ended] = here[num_rows, ended]
        before, last = last, here
    return np.asarray(cost / (num_rows + lengths), np.float64)


class Listener:
    """Finds the nearest of all texts that it knows, or None if none is as long.

    Among many texts it first looks for near ones by every third frame.
    """

    def __init__(self, templates: Mapping[str, Floats]) -> None:
        self.templates = templates

    def hear(self, wave: NDArray[np.float32], rate: int) -> str | None:
        return self.recognise(heard(wave, rate))

    def recognise(self, rows: Floats) -> str | None:
        near = [
            text
            for text, template in self.templates.items()
            if min(len(rows), len(template)) >= LEAST_LIKE_IN_LENGTH * max(len(rows), len(template))
        ]
        if len(near) > FEW:
            near = self.nearest(rows, near, COARSE)[:FEW]
        return self.nearest(rows, near, 1)[0] if near else None

    def nearest(self, rows: Floats, texts: Sequence[str], every: int) -> list[str]:
        """The texts by their distance in one of `every` frames."""
        templates = [self.templates[text][::every] for text in texts]
        order = warped_distances(rows[::every], templates).argsort(kind="stable")
        return [texts[number] for number in order]
