"""Bicubic resizing of 8-bit frames, bit for bit as torch computes it with `antialias`.

torch rounds the weights of each axis to 16 bits, adds products of integers, and rounds the result
for the rows to 8 bits before the columns. All of this is exact in sufficiently wide floats. Matrix
products can therefore compute it, and a renderer needs no torch for videos.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CUBIC = -0.5
"""Parameter of the bicubic filter. The filter extends 2 pixels to each side."""
BLOCK_LEN = 32
"""Number of results that are computed by one product, because each needs only a few values."""
MAX_VALUES = 2**20
"""Limit on the values that are computed together, as floats."""
MAX_PRECISION = 22

Values = NDArray[np.uint8]


class _Block(NamedTuple):
    """Consecutive results of an axis, and the values that they depend on."""

    results: slice
    values: slice
    weights: NDArray[np.floating]
    """[values, results], integers"""


class _Weights(NamedTuple):
    blocks: Sequence[_Block]
    precision: int
    """Number of fractional bits of the weights."""


def resize_bicubic(frame: Values, height: int, width: int) -> Values:
    """Return a frame [height, width, channels] in another size: [channels, height, width]."""
    planes = np.ascontiguousarray(frame.transpose(2, 0, 1))
    if planes.shape[2] != width:
        planes = _resize_rows(planes, width)
    if planes.shape[1] != height:
        columns = np.ascontiguousarray(planes.transpose(0, 2, 1))
        planes = np.ascontiguousarray(_resize_rows(columns, height).transpose(0, 2, 1))
    return planes


def _resize_rows(planes: Values, length: int) -> Values:
    """Return the planes with rows of another length."""
    weights = _weights_of(planes.shape[2], length)
    rows = planes.reshape(-1, planes.shape[2])
    resized = np.empty((len(rows), length), np.uint8)
    num_rows = max(1, MAX_VALUES // planes.shape[2])
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows].astype(weights.blocks[0].weights.dtype)
        for block in weights.blocks:
            sums = part[:, block.values] @ block.weights
            # Adding half a unit and truncating rounds to the nearest integer.
            sums += 2.0 ** (weights.precision - 1)
            sums *= 2.0**-weights.precision
            np.floor(sums, out=sums)
            resized[start : start + num_rows, block.results] = sums.clip(0, 255, out=sums)
    return resized.reshape(*planes.shape[:2], length)


@lru_cache(maxsize=64)
def _weights_of(num_values: int, num_results: int) -> _Weights:
    scale = num_values / num_results
    widening = max(scale, 1.0)
    centers = scale * (np.arange(num_results) + 0.5)
    starts = np.maximum((centers - 2 * widening + 0.5).astype(np.int64), 0)
    stops = np.minimum((centers + 2 * widening + 0.5).astype(np.int64), num_values)
    offsets = np.arange(int((stops - starts).max()))
    indexes = starts[:, None] + offsets  # [results, taps]
    weights = _cubic((indexes - centers[:, None] + 0.5) * (1 / widening))
    weights[indexes >= stops[:, None]] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    precision = 0
    while precision < MAX_PRECISION and int(0.5 + weights.max() * 2 ** (precision + 1)) < 2**15:
        precision += 1
    rounded = np.trunc(weights * 2.0**precision + np.copysign(0.5, weights))
    # The sums of float32 are exact below 2**24.
    is_narrow = 255 * np.abs(rounded).sum(axis=1).max() + 2**precision < 2**24
    dtype = np.float32 if is_narrow else np.float64
    blocks = []
    for first in range(0, num_results, BLOCK_LEN):
        results = slice(first, min(first + BLOCK_LEN, num_results))
        values = slice(int(starts[results].min()), int(stops[results].max()))
        dense = np.zeros((values.stop - values.start + len(offsets), BLOCK_LEN), dtype)
        for number, row in enumerate(rounded[results]):
            at = int(starts[first + number]) - values.start
            dense[at : at + len(row), number] = row
        dense = dense[: values.stop - values.start, : results.stop - results.start]
        blocks.append(_Block(results, values, np.ascontiguousarray(dense)))
    return _Weights(blocks, precision)


def _cubic(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(distances)
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * CUBIC
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
