"""Order of a video and its sound among the tokens of an item.

The rules are the same as in transformers' processors and positions of Qwen2.5-Omni and Qwen3-Omni.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.models.mrope import grid_positions, timed_positions

Indexes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SoundingVideo:
    """A video with its sound in alternating chunks of equal time, between a begin and an end mark.

    Each chunk has the embeddings of its frames, and then the embeddings of its sound.
    """

    frames: int
    rows: int
    columns: int
    step: float
    """Positions from one frame to the next. The position of each frame is rounded down."""
    num_heard: int
    """Number of embeddings of the sound. Each has one position."""
    chunk_len: int
    """Number of positions in a chunk."""
    offset: int = 0
    """Index of the first mark in the prompt."""

    @property
    def num_seen(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def length(self) -> int:
        return self.num_seen + self.num_heard + 2

    def order(self) -> Indexes:
        """Return the order of the embeddings, without the marks.

        The embeddings of the sound are numbered after the embeddings of the video.
        """
        video_chunks = self._split(self._seen()[0])
        sound_chunks = self._split(np.arange(self.num_heard))
        parts = []
        for number in range(max(len(video_chunks), len(sound_chunks))):
            parts += video_chunks[number : number + 1]
            parts += [part + self.num_seen for part in sound_chunks[number : number + 1]]
        return np.concatenate(parts)

    def positions(self) -> tuple[Indexes, int]:
        """Return the positions [3, length], and the position of the next token.

        Position 0 is the position after the previous token. Each mark shares the position of the
        video's mark next to it.
        """
        sound = np.broadcast_to(np.arange(self.num_heard), (3, self.num_heard))
        inner = np.concatenate([self._seen(), sound], axis=1)[:, self.order()]
        # The end follows the last embedding, which may not have the largest position: the last
        # frame may be later than the end of the sound.
        end = int(inner[:, -1].max()) + 1
        first, last = np.full((3, 1), -1), np.full((3, 1), end)
        return np.concatenate([first, inner, last], axis=1), end

    def _seen(self) -> Indexes:
        return grid_positions(self.frames, self.rows, self.columns, self.step)

    def _split(self, times: Indexes) -> list[Indexes]:
        """Return the indexes of ascending times in chunks that are not empty.

        A chunk begins with the first time in its interval. After an interval without times, the
        next chunks have one index each, as in transformers.
        """
        starts = [0]
        while True:
            begin = int(np.searchsorted(times, self.chunk_len * len(starts)))
            begin = max(begin, starts[-1] + 1)
            if begin >= len(times):
                return np.split(np.arange(len(times)), starts[1:])
            starts.append(begin)


@dataclass(frozen=True, slots=True)
class MergedVideo:
    """A video with its sound, sorted by time, between a begin mark and an end mark."""

    times: NDArray[np.float32]
    """Position of each frame, from 0 on."""
    rows: int
    columns: int
    num_heard: int
    """Number of embeddings of the sound. Each has one position."""
    offset: int = 0
    """Index of the first mark in the prompt."""

    @property
    def num_seen(self) -> int:
        return len(self.times) * self.rows * self.columns

    @property
    def length(self) -> int:
        return self.num_seen + self.num_heard + 2

    def order(self) -> Indexes:
        """Return the order of the embeddings, as in `SoundingVideo`. A frame precedes its sound."""
        frames = np.repeat(self.times, self.rows * self.columns)
        return np.argsort(np.append(frames, np.arange(self.num_heard)), kind="stable")

    def positions(self) -> tuple[NDArray[np.float32], float]:
        """Return the positions [3, length], and the position of the next token."""
        order = self.order()
        frames = timed_positions(self.times, self.rows, self.columns)
        sound = np.broadcast_to(np.arange(self.num_heard, dtype=np.float32), (3, self.num_heard))
        inner = np.concatenate([frames, sound], axis=1)[:, order] + 1
        # The end follows the last embeddings of one kind, as in transformers.
        is_seen = order < self.num_seen
        num_before = np.flatnonzero(is_seen != is_seen[-1])[-1] + 1
        end = inner[:, num_before:].max() + 1
        first, last = np.zeros((3, 1), np.float32), np.full((3, 1), end)
        return np.concatenate([first, inner, last], axis=1), float(end) + 1
