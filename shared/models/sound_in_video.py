"""Order of a video and its sound among the tokens of an item: chunks of equal time, in turn.

Each chunk has the embeddings of the frames in it, and then those of the sound. The rules are those
of transformers' processor and positions of Qwen2.5-Omni.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.models.mrope import grid_positions

Indexes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SoundingVideo:
    """A video with its sound, between a mark of its beginning and one of its end."""

    frames: int
    rows: int
    columns: int
    step: float
    """Positions from one frame to the next; each frame's is rounded down."""
    num_heard: int
    """Embeddings of the sound, each of which is one position."""
    chunk_len: int
    """Positions of a chunk."""
    offset: int = 0
    """Index of the first mark in the prompt."""

    @property
    def num_seen(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def length(self) -> int:
        return self.num_seen + self.num_heard + 2

    def order(self) -> Indexes:
        """Return the embeddings in their order; those of the sound are numbered behind the video's.

        The marks are not among them.
        """
        seen = self._split(self._seen()[0])
        heard = self._split(np.arange(self.num_heard))
        parts = []
        for number in range(max(len(seen), len(heard))):
            parts += seen[number : number + 1]
            parts += [part + self.num_seen for part in heard[number : number + 1]]
        return np.concatenate(parts)

    def positions(self) -> tuple[Indexes, int]:
        """Return the positions [3, length], and that of the token behind them.

        They count from the position behind the token before. Each mark shares the position of the
        mark of the video around it.
        """
        heard = np.broadcast_to(np.arange(self.num_heard), (3, self.num_heard))
        inner = np.concatenate([self._seen(), heard], axis=1)[:, self.order()]
        # Not behind the largest position: the last frame may be later than the end of the sound.
        end = int(inner[:, -1].max()) + 1
        first, last = np.full((3, 1), -1), np.full((3, 1), end)
        return np.concatenate([first, inner, last], axis=1), end

    def _seen(self) -> Indexes:
        return grid_positions(self.frames, self.rows, self.columns, self.step)

    def _split(self, times: Indexes) -> list[Indexes]:
        """Return the indexes of ascending times in chunks, none of which is empty.

        A chunk begins with the first time that is not before its own. Where there is none for
        longer than a chunk, the next chunks have one index each, as in transformers.
        """
        starts = [0]
        while True:
            begin = int(np.searchsorted(times, self.chunk_len * len(starts)))
            begin = max(begin, starts[-1] + 1)
            if begin >= len(times):
                return np.split(np.arange(len(times)), starts[1:])
            starts.append(begin)
