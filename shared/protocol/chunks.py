"""Chunks: the parts into which a stage cuts its input frames, computed one by one. Pure."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

# A record holds a chunk's output, and must fit into a message of the broker.
MAX_FRAMES = 1000
Frames = Annotated[int, Meta(ge=1, le=MAX_FRAMES)]
Context = Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class ChunkSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a stage's chunks and of the context that each is computed with, in frames. A chunk
    is computed as soon as its frames and its context have arrived."""

    first: tuple[Frames, ...] = ()
    """Sizes of the first chunks. Small ones let the output begin early."""
    size: Frames = 25
    """Size of all later chunks; the last chunk may be shorter."""
    left: Context = 2
    """Context before a chunk; at the beginning there is less."""
    right: Context = 2
    """Context after a chunk; at the end there is less."""
    max_ahead: Annotated[int, Meta(ge=1)] = 1000
    """Limit on the frames that the previous stage may be ahead of the computed chunks. Beyond it,
    the previous stage releases its memory and waits."""

    @property
    def min_ahead(self) -> int:
        """Smallest `max_ahead` with which every chunk can be computed."""
        return max(self.size, *self.first, 0) + self.right

    def frames_of(self, num_chunks: int) -> int:
        """Return the number of frames in the first `num_chunks` chunks."""
        return sum(self.first[:num_chunks]) + self.size * max(0, num_chunks - len(self.first))

    def completes(self, num_frames: int) -> bool:
        """Return whether the last one of `num_frames` frames completes a chunk and its context."""
        behind = num_frames - self.right
        for size in self.first:
            if behind <= size:
                return behind == size
            behind -= size
        return behind > 0 and behind % self.size == 0

    def __str__(self) -> str:
        sizes = [*map(str, self.first), f"{'then ' if self.first else ''}{self.size}"]
        return f"{', '.join(sizes)} frames, with {self.left} before and {self.right} after"


def interpolate(marks: Sequence[tuple[int, int]], place: float) -> int:
    """Return the number at a place, interpolated between marks and rounded down.

    Marks are pairs of a place and a number, both in ascending order. The number at place 0 is 0,
    and after the last mark it is the last mark's number.
    """
    before = 0, 0
    for mark in marks:
        if place < mark[0]:
            share = (place - before[0]) / (mark[0] - before[0])
            return before[1] + int(share * (mark[1] - before[1]))
        before = mark
    return before[1]
