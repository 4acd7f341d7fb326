"""Which frames a chunk is made of: a function of where it begins and of the frames, never of time.

    start     end              a chunk's own frames, whose samples it adds to the sound
  left <- |     | -> right     its context, cut off at both ends of the speech

So an attempt that goes on behind another one computes what that one would have computed.
"""

from typing import NamedTuple

from shared.protocol.chunks import ChunkSpec


class Window(NamedTuple):
    """The frames of one chunk, as indexes of the speech."""

    first: int
    """The first frame of the context before."""
    start: int
    """The first frame of the chunk."""
    end: int
    """The frame behind the last one of the chunk."""
    last: int
    """The frame behind the last one of the context."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frames before, in and behind the chunk. Chunks of one shape may share a batch."""
        return self.start - self.first, self.end - self.start, self.last - self.end


def window_at(spec: ChunkSpec, start: int, num_frames: int, *, is_complete: bool) -> Window | None:
    """The window of the chunk that begins at frame `start`, of a speech with `num_frames` so far.

    None while frames of it are missing, and when the speech is complete without it.
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
    """Where the chunk with frame `start` ends in a speech that is long enough."""
    boundary = 0
    for size in spec.first:
        boundary += size
        if start < boundary:
            return boundary
    return boundary + ((start - boundary) // spec.size + 1) * spec.size
