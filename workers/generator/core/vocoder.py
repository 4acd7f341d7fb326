"""Interface of vocoders, which convert the frames of a codec to sound.

A vocoder is a function of frames. It keeps no state of a speech: the frames before a chunk's
context affect it only by one number, `carry`, which it computes from these frames.
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
    """Properties of a request that affect its sound, in addition to its codes."""

    voice: str | None = None
    """None for a stage with one voice."""
    seed: int = 0
    """Seed of the initial noise in some vocoders."""


ONE_SPEAKER = Speaker()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Input for one chunk."""

    codes: Codes
    """Frames of the chunk and of its context."""
    position: int
    """Index of the first of these frames in the speech."""
    left: int
    """Frames before the chunk; fewer than the context only at the beginning of the speech."""
    right: int
    """Frames after the chunk; fewer than the context only at the end of the speech."""
    carry: int = 0
    """Result of `Vocoder.carry` for `position`."""
    speaker: Speaker = ONE_SPEAKER


class Vocoder(Protocol):
    """Converts frames to sound."""

    sample_rate: int
    """Samples per second."""
    samples_per_frame: int
    num_codebooks: int
    """Number of codes in one frame."""
    num_codes: int
    """Number of different codes. Codes are from 0 to one less."""
    min_left: int
    """Frames of context that a chunk needs before it, in addition to `carry`."""
    min_right: int
    """Frames of context that a chunk needs after it."""
    num_missing: int
    """Number of samples that the last frame of a speech lacks; less than `samples_per_frame`."""

    def carry(self, codes: Codes, position: int) -> int:
        """Return the effect of earlier frames on chunks with a context from `position` on.

        `codes` has all frames from the beginning of the speech to the frame at `position`, or more.
        """

    def synthesize(self, chunks: Sequence[Chunk]) -> list[Samples]:
        """Return the samples of each chunk, without its context.

        All chunks have the same shape and voice.
        """


def cut(vocoder: Vocoder, codes: Codes, window: Window, speaker: Speaker = ONE_SPEAKER) -> Chunk:
    """Return the chunk at `window` of a speech; `codes` has its frames from the beginning on."""
    left, _, right = window.shape
    carry = vocoder.carry(codes, window.first)
    return Chunk(codes[window.first : window.last], window.first, left, right, carry, speaker)
