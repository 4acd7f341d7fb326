"""The codec: k-means over frames, one code of 1,024 for each frame of 20 ms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from ops.training.audio import Floats
from ops.training.voice.features import (
    BAND_HZ,
    FLOOR,
    FRAME_RATE,
    NUM_BANDS,
    RECORDED_RATE,
    Features,
    cepstra,
)

NUM_CODES = 1024
SAMPLE_RATE = 24000
NUM_CEPSTRA = 24
# Weights of an octave of pitch and of a change to voiced, compared with the cepstra.
PITCH_WEIGHT, VOICED_WEIGHT = 6.0, 4.0
MEDIUM_PITCH = 110.0
ROUNDS = 14
SAMPLED_FRAMES = 60_000
# Cost of a change of code, in parts of the mean error. It keeps codes from flickering between
# neighbours, which a talker could not foresee.
CHANGE_COST = 1.0
# Pulses have higher peaks than the recordings; at this level none is clipped.
LEVEL = 0.65


@dataclass(frozen=True, slots=True)
class Codec:
    centres: Tensor
    change_cost: float

    def codes_of(self, features: Features) -> NDArray[np.int16]:
        """The cheapest path through the codes, of distances to the centres and of changes."""
        distance = torch.cdist(torch.from_numpy(points_of(features)), self.centres).numpy() ** 2
        cost = distance[0]
        came_from = np.zeros(distance.shape, np.int16)
        for frame in range(1, len(distance)):
            cheapest = int(cost.argmin())
            changed = cost[cheapest] + self.change_cost
            stays = cost <= changed
            came_from[frame] = np.where(stays, np.arange(NUM_CODES), cheapest)
            cost = np.where(stays, cost, changed) + distance[frame]
        path = [int(cost.argmin())]
        for frame in range(len(distance) - 1, 0, -1):
            path.append(int(came_from[frame, path[-1]]))
        return np.array(path[::-1], np.int16)


def points_of(features: Features) -> Floats:
    """Frames as points whose distances resemble what is heard."""
    is_voiced = features.pitch > 0
    octaves = np.log2(np.where(is_voiced, features.pitch, MEDIUM_PITCH) / MEDIUM_PITCH)
    columns = [PITCH_WEIGHT * octaves, VOICED_WEIGHT * is_voiced]
    shape = cepstra(features.envelope, NUM_CEPSTRA)
    return np.concatenate([shape, np.stack(columns, axis=1)], axis=1).astype(np.float32)


def train_codec(often: Sequence[Features], others: Sequence[Features], seed: int) -> Codec:
    """K-means; all frames of `often` take part, and as many of the others as there is room for."""
    generator = torch.Generator().manual_seed(seed)
    none = np.zeros((0, NUM_CEPSTRA + 2), np.float32)
    near = torch.from_numpy(np.concatenate([none, *map(points_of, often)]))
    far = torch.from_numpy(np.concatenate([none, *map(points_of, others)]))
    chosen = torch.randperm(len(far), generator=generator)[: SAMPLED_FRAMES - len(near)]
    points = torch.cat([near, far[chosen]])
    centres = points[torch.randperm(len(points), generator=generator)[:NUM_CODES]].clone()
    for _ in range(ROUNDS):
        nearest = nearest_of(points, centres)
        counts = torch.bincount(nearest, minlength=NUM_CODES)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        means = sums / counts.clamp(min=1)[:, None]
        unused = counts == 0
        fresh = torch.randint(len(points), (int(unused.sum()),), generator=generator)
        means[unused] = points[fresh]
        centres = means
    error = (points - centres[nearest_of(points, centres)]).square().sum(1).mean()
    return Codec(centres, CHANGE_COST * float(error))


def nearest_of(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cat([torch.cdist(part, centres).argmin(1) for part in points.split(4096)])


def make_table(
    spoken: Sequence[tuple[Features, NDArray[np.int16]]],
) -> dict[str, NDArray[np.floating]]:
    """Return the vocoder's table: for each code, the mean of the frames that have it."""
    counts = np.zeros(NUM_CODES)
    sums = np.zeros((NUM_CODES, NUM_BANDS))
    voiced, octaves, voicing = np.zeros(NUM_CODES), np.zeros(NUM_CODES), np.zeros(NUM_CODES)
    for features, row in spoken:
        is_voiced = features.pitch > 0
        np.add.at(counts, row, 1)
        np.add.at(sums, row, features.envelope)
        np.add.at(voiced, row, is_voiced)
        np.add.at(voicing, row, features.voicing)
        np.add.at(octaves, row[is_voiced], np.log2(features.pitch[is_voiced]))
    # A code that no frame has is silence.
    sums[counts == 0] = np.log(FLOOR)
    counts, some_voiced = np.maximum(counts, 1), np.maximum(voiced, 1)
    # The recordings have fewer samples a second than the voice, so each carries more power.
    scale = np.log(LEVEL) + 0.5 * np.log(SAMPLE_RATE / RECORDED_RATE)
    is_voiced = voiced / counts > 0.5
    return {
        "envelope": (sums / counts[:, None] + scale).astype(np.float16),
        "pitch": np.where(is_voiced, 2 ** (octaves / some_voiced), 0).astype(np.float16),
        "voicing": np.where(is_voiced, voicing / some_voiced, 0).astype(np.float16),
        "band_hz": BAND_HZ.astype(np.float32),
    }


def save_table(table: dict[str, NDArray[np.floating]], path: Path) -> None:
    rates = {"sample_rate": str(SAMPLE_RATE), "frame_rate": str(FRAME_RATE)}
    save_file(table, path, {"format": "pagemill.code2wav.1", **rates})
