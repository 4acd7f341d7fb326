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

from ops.demo_training.samples import KIND_WEIGHTS, training_samples
from ops.demo_training.scenes import (
    CELL,
    CHARACTERS,
    COLOUR_NAMES,
    MAX_COUNT,
    SHAPE_NAMES,
    common_fit,
    draw_scene,
    fitted,
    training_size,
)
from ops.demo_training.tokenizer import Encoder


@dataclass(slots=True)
class PictureGroup:
    """Pictures of one size, which the tower can take as one batch, and where they belong."""

    pixels: Tensor
    index: Tensor


@dataclass(slots=True)
class TowerBatch:
    groups: list[PictureGroup]
    labels: dict[str, Tensor]


@dataclass(slots=True)
class ChatBatch:
    groups: list[PictureGroup]
    ids: Tensor
    lengths: list[int]
    positions: Tensor
    predict_at: Tensor
    targets: Tensor
    weights: Tensor


def group_pictures(
    pictures: Sequence[Image.Image], places: Sequence[Sequence[int]]
) -> list[PictureGroup]:
    """Gathers pictures by size; `places` says which rows of the result each picture fills."""
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
# Share of the training of the tower, from its begin, in which all pictures are small.
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
        shown = [getattr(scene, name) for scene in scenes]
        numbers = [IGNORED if value is None else values.index(str(value)) for value in shown]
        labels[name] = torch.tensor(numbers)
    return TowerBatch(group_pictures(pictures, [[n] for n in range(size)]), labels)


def chat_batch(rng: random.Random, size: int, encoder: Encoder) -> ChatBatch:
    drawn = []
    for sample in training_samples(rng, size):
        shown = [fitted(picture) for picture in sample.pictures]
        grids = [(picture.height // CELL, picture.width // CELL) for picture in shown]
        drawn.append((encoder.encode(sample, grids), shown))
    # Sorted by length, so that the text model can take neighbours together with little padding.
    drawn.sort(key=lambda pair: len(pair[0].ids))
    rows = [row for row, _ in drawn]
    length = -(-len(rows[-1].ids) // 8) * 8
    ids = torch.full((size, length), encoder.ids["<|endoftext|>"])
    positions = torch.zeros((3, size, length), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        positions[:, number, : len(row.ids)] = torch.from_numpy(row.positions)
    pictures, places = [], []
    for number, (row, shown) in enumerate(drawn):
        for picture, image_start in zip(shown, row.image_starts, strict=True):
            start = number * length + image_start
            pictures.append(picture)
            places.append(range(start, start + picture.width * picture.height // CELL**2))
    answers = torch.tensor([n * length + at for n, row in enumerate(rows) for at in row.answers])
    return ChatBatch(
        group_pictures(pictures, places),
        ids,
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
