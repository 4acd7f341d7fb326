"""Batches of both phases, drawn by worker processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from ops.training.seeing.drawing import draw_scene
from ops.training.seeing.samples import KIND_WEIGHTS, Sample, training_samples
from ops.training.seeing.scenes import (
    CELL,
    CHARACTERS,
    COLOUR_NAMES,
    MAX_COUNT,
    SHAPE_NAMES,
    common_fit,
    fitted,
    training_size,
)
from ops.training.seeing.tokenizer import Encoder, Grid, Row


@dataclass(slots=True)
class PictureGroup:
    """Pictures, or pairs of frames, of one size, for the tower, and where their tokens belong."""

    pixels: Tensor
    index: Tensor


@dataclass(slots=True)
class TowerBatch:
    groups: list[PictureGroup]
    labels: dict[str, Tensor]

    @property
    def num_samples(self) -> int:
        return sum(len(group.pixels) for group in self.groups)

    @property
    def num_tokens(self) -> int:
        return sum(len(group.index) for group in self.groups)


@dataclass(slots=True)
class ChatBatch:
    groups: list[PictureGroup]
    ids: Tensor
    turns: Tensor
    lengths: list[int]
    positions: Tensor
    predict_at: Tensor
    targets: Tensor
    weights: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def group_pictures(
    pictures: Sequence[Image.Image], places: Sequence[Sequence[int]]
) -> list[PictureGroup]:
    """Gathers pictures by size; `places` are the rows of the result for each picture."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for number, picture in enumerate(pictures):
        by_size.setdefault(picture.size, []).append(number)
    groups = []
    for numbers in by_size.values():
        pixels = np.stack([np.asarray(pictures[number]) for number in numbers])
        index = [place for number in numbers for place in places[number]]
        groups.append(
            PictureGroup(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.tensor(index))
        )
    return groups


LABELS: dict[str, tuple[str, ...]] = {
    "colour": COLOUR_NAMES,
    "background": COLOUR_NAMES,
    "shape": SHAPE_NAMES,
    "count": tuple(str(number) for number in range(1, MAX_COUNT + 1)),
    "character": tuple(CHARACTERS),
}
IGNORED = -100
# All pictures are small in this first share of the training of the tower.
SMALL_SHARE = 0.6
SMALL_SIZE = (56, 56)


def tower_batch(rng: random.Random, size: int, progress: float) -> TowerBatch:
    pictures, scenes = [], []
    # Small pictures first: they teach the same in less than half the time.
    small = progress < SMALL_SHARE
    final = SMALL_SIZE if small else common_fit(rng)
    for _ in range(size):
        kind = rng.choices(tuple(KIND_WEIGHTS), tuple(KIND_WEIGHTS.values()))[0]
        # At first many large ones in black on white, so that outlines are met without the colours.
        easy = rng.random() < 0.8 - 5 * progress
        kind = rng.choice(("shape", "character")) if easy else kind
        colours = ("black", "white") if easy else None
        size_drawn = final if small else training_size(rng, kind, final)
        picture, scene = draw_scene(rng, kind, size_drawn, colours)
        pictures.append(picture if small else fitted(picture))
        scenes.append(scene)
    labels = {}
    for name, values in LABELS.items():
        values_of = [getattr(scene, name) for scene in scenes]
        numbers = [IGNORED if value is None else values.index(str(value)) for value in values_of]
        labels[name] = torch.tensor(numbers)
    return TowerBatch(group_pictures(pictures, [[n] for n in range(size)]), labels)


def frame_pairs(clip: Sequence[Image.Image]) -> np.ndarray:
    """Pairs of frames, the last one doubled if it is alone, as [pairs, 2, height, width, 3]."""
    frames = [np.asarray(frame) for frame in clip]
    frames += frames[-1:] * (len(frames) % 2)
    return np.stack(frames).reshape(-1, 2, *frames[0].shape)


def clip_groups(rows: Sequence[tuple[np.ndarray, int]]) -> list[PictureGroup]:
    """Gathers the pairs of frames by size; each row is a clip and the place of its first token."""
    by_size: dict[tuple[int, ...], list[tuple[np.ndarray, int]]] = {}
    for pairs, start in rows:
        by_size.setdefault(pairs.shape[1:], []).append((pairs, start))
    groups = []
    for same in by_size.values():
        pixels = np.concatenate([pairs for pairs, _ in same])
        cells = pixels.shape[2] * pixels.shape[3] // CELL**2
        places = [np.arange(start, start + cells * len(pairs)) for pairs, start in same]
        groups.append(
            PictureGroup(
                torch.from_numpy(pixels).permute(0, 1, 4, 2, 3),
                torch.from_numpy(np.concatenate(places)),
            )
        )
    return groups


def grid_of(picture: Image.Image, pairs: int = 1) -> Grid:
    return pairs, picture.height // CELL, picture.width // CELL


@dataclass(slots=True)
class EncodedSample:
    row: Row
    pictures: list[Image.Image]
    pairs: np.ndarray | None


def encoded(sample: Sample, encoder: Encoder) -> EncodedSample:
    pictures = [fitted(picture) for picture in sample.pictures]
    grids = [grid_of(picture) for picture in pictures]
    pairs = None
    if sample.clip:
        frames = [fitted(frame) for frame in sample.clip]
        pairs = frame_pairs(frames)
        grids = [grid_of(frames[0], len(pairs))]
    return EncodedSample(encoder.encode(sample, grids), pictures, pairs)


def chat_batch(rng: random.Random, size: int, encoder: Encoder) -> ChatBatch:
    return collated([encoded(sample, encoder) for sample in training_samples(rng, size)], encoder)


def collated(drawn: list[EncodedSample], encoder: Encoder) -> ChatBatch:
    size = len(drawn)
    # Sorted by length, so that the text model can take neighbours together with little padding.
    drawn.sort(key=lambda item: len(item.row.ids))
    rows = [item.row for item in drawn]
    length = -(-len(rows[-1].ids) // 8) * 8
    ids = torch.full((size, length), encoder.ids["<|endoftext|>"])
    turns = torch.zeros((size, length), dtype=torch.long)
    positions = torch.zeros((3, size, length), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        turns[number, : len(row.ids)] = torch.tensor(row.turns)
        positions[:, number, : len(row.ids)] = torch.from_numpy(row.positions)
    pictures, places, clips = [], [], []
    for number, item in enumerate(drawn):
        starts = [number * length + start for start in item.row.media_starts]
        for picture, start in zip(item.pictures, starts, strict=False):
            pictures.append(picture)
            places.append(range(start, start + picture.width * picture.height // CELL**2))
        if item.pairs is not None:
            clips.append((item.pairs, starts[0]))
    answers = torch.tensor([n * length + at for n, row in enumerate(rows) for at in row.answers])
    return ChatBatch(
        [*group_pictures(pictures, places), *clip_groups(clips)],
        ids,
        turns,
        [len(row.ids) for row in rows],
        positions,
        answers - 1,
        ids.flatten()[answers],
        torch.tensor([weight for row in rows for weight in row.weights]),
    )


class Batches(IterableDataset[Any]):
    """An endless stream of batches, drawn in the loader's processes."""

    def __init__(
        self, make: Callable[[random.Random, float], Any], seed: str, progress: Synchronized[float]
    ) -> None:
        self.make = make
        self.seed = seed
        self.progress = progress

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        while True:
            yield self.make(rng, self.progress.value)
