"""Frames of each chunk: a function of the chunk's start and of the frames, never of time.

    start     end              frames of the chunk; only their samples are added to the sound
  left <- |     | -> right     context, cut off at both ends of the speech

An attempt that continues another one therefore computes the same chunks.
"""

from typing import NamedTuple

from shared.protocol.chunks import ChunkSpec


class Window(NamedTuple):
    """Frames of one chunk, as indexes in the speech."""

    first: int
    """First frame of the context before the chunk."""
    start: int
    """First frame of the chunk."""
    end: int
    """Index after the last frame of the chunk."""
    last: int
    """Index after the last frame of the context."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of frames before, in and after the chunk. Equal shapes may share a batch."""
        return self.start - self.first, self.end - self.start, self.last - self.end


def window_at(spec: ChunkSpec, start: int, num_frames: int, *, is_complete: bool) -> Window | None:
    """Return the window of the chunk at frame `start` of a speech with `num_frames` so far.

    Returns None while frames of it are missing, and if the complete speech has no such chunk.
    """
    end = end_of(spec, start)
    if is_complete:
        end = min(end, num_frames)
    elif end + spec.right > num_frames:
        return None
    if end <= start:
        return None
    return Window(max(0, start - spec.left), start, end, min(end + spec.right, num_frames))


def end_of(spec: ChunkSpec, start: int) -> int:
    """Return the end of the chunk with frame `start`, in a speech that is long enough."""
    boundary = 0
    for size in spec.first:
        boundary += size
        if start < boundary:
            return boundary
    return boundary + ((start - boundary) // spec.size + 1) * spec.size
