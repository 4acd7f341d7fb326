"""The interface of vocoders, which make sound of the frames of a codec.

A vocoder is a function of frames. It keeps no state of a speech: what it has to know of the frames
before a chunk's context is one number, `carry`, which it computes from these frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.generator.core.schedule import Window

Codes = NDArray[np.int32]
"""Codes of consecutive frames, [num_frames, num_codebooks]."""
Samples = NDArray[np.int16]
"""Samples of one channel."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """What the sound of a request depends on beside its codes."""

    voice: str | None = None
    """None for a stage that has one voice."""
    seed: int = 0
    """The seed of the noise that some vocoders begin with."""


ONE_SPEAKER = Speaker()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The input of one chunk."""

    codes: Codes
    """Frames of the chunk and of its context."""
    position: int
    """Index of the first of these frames in the speech."""
    left: int
    """Frames before the chunk; fewer than the context at the beginning of the speech alone."""
    right: int
    """Frames behind the chunk; fewer than the context at the end of the speech alone."""
    carry: int = 0
    """What `Vocoder.carry` has returned for `position`."""
    speaker: Speaker = ONE_SPEAKER


class Vocoder(Protocol):
    """Makes sound of frames."""

    sample_rate: int
    """Samples a second."""
    samples_per_frame: int
    num_codebooks: int
    """Codes of one frame."""
    num_codes: int
    """Codes are less than this."""
    min_left: int
    """Frames of context that a chunk needs before it, but for `carry`."""
    min_right: int
    """Frames of context that a chunk needs behind it."""
    num_missing: int
    """Samples that the end of a speech has fewer than its frames, less than one frame has."""

    def carry(self, codes: Codes, position: int) -> int:
        """What the chunks with a context from `position` on need of the frames before.

        `codes` has all frames from the beginning of the speech to the one at `position`, or more.
        """

    def synthesize(self, chunks: Sequence[Chunk]) -> list[Samples]:
        """The samples of each chunk, without its context. All have the same shape and voice."""


def cut(vocoder: Vocoder, codes: Codes, window: Window, speaker: Speaker = ONE_SPEAKER) -> Chunk:
    """The chunk at `window` of a speech whose frames from the beginning on are `codes`."""
    left, _, right = window.shape
    carry = vocoder.carry(codes, window.first)
    return Chunk(codes[window.first : window.last], window.first, left, right, carry, speaker)
