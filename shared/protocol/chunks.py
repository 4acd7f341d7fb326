"""How a stage cuts the frames that it follows into chunks, which are computed one by one. Pure."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

# A record holds a chunk's output, and must fit into a message of the broker.
MAX_FRAMES = 1000
Frames = Annotated[int, Meta(ge=1, le=MAX_FRAMES)]
Context = Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class ChunkSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a stage's chunks, and the context that each is computed with, in frames. A chunk is
    computed when its frames and its context are there, whenever that is."""

    first: tuple[Frames, ...] = ()
    """Sizes of the first chunks. Small ones let the output begin early."""
    size: Frames = 25
    """Size of all chunks behind them; the last chunk may be shorter."""
    left: Context = 2
    """Frames before a chunk, as far as there are any."""
    right: Context = 2
    """Frames behind a chunk, as far as there are any."""
    max_ahead: Annotated[int, Meta(ge=1)] = 1000
    """Limit on the frames that the stage before may be ahead of the chunks that are made. Beyond
    it, the stage before gives up its memory and waits."""

    @property
    def min_ahead(self) -> int:
        """Frames without which some chunk could never be computed."""
        return max(self.size, *self.first, 0) + self.right

    def frames_of(self, num_chunks: int) -> int:
        """Return the frames of the first chunks."""
        return sum(self.first[:num_chunks]) + self.size * max(0, num_chunks - len(self.first))

    def completes(self, num_frames: int) -> bool:
        """Return whether a chunk can be computed with so many frames, but not with one fewer."""
        behind = num_frames - self.right
        for size in self.first:
            if behind <= size:
                return behind == size
            behind -= size
        return behind > 0 and behind % self.size == 0

    def __str__(self) -> str:
        sizes = [*map(str, self.first), f"{'then ' if self.first else ''}{self.size}"]
        return f"{', '.join(sizes)} frames, with {self.left} before and {self.right} behind"


def interpolate(marks: Sequence[tuple[int, int]], place: float) -> int:
    """Return the whole number at a place between marks, which are of ascending places and numbers.

    The number at place 0 is 0, and behind the last mark it is that of the last mark.
    """
    before = 0, 0
    for mark in marks:
        if place < mark[0]:
            share = (place - before[0]) / (mark[0] - before[0])
            return before[1] + int(share * (mark[1] - before[1]))
        before = mark
    return before[1]
