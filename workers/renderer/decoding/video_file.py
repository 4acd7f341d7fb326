"""Interface of video readers, and their common limits."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.decoding.refusal import Refusal
from workers.renderer.decoding.messages import DecodingLimits, VideoProbe

DAMAGED = "the video is damaged or incomplete"


Pixels = NDArray[np.uint8]
"""A frame: RGB, upright, [height, width, 3]; valid until the next frame is read."""


class VideoFile(Protocol):
    """A video with a header and packets within the limits. Every error is a Refusal."""

    probe: VideoProbe

    def frames(self, indexes: Sequence[int]) -> Iterator[Pixels]:
        """Yield the frames of these ascending indexes. Other frames are decoded only if needed."""
        ...


def check_size(width: int, height: int, limits: DecodingLimits) -> None:
    if width < 1 or height < 1:
        raise Refusal("invalid", f"a video of {width} x {height} pixels is empty")
    if max(width, height) > limits.max_side:
        raise Refusal(
            "too_large",
            f"a video of {width} x {height} is over the limit of {limits.max_side} pixels a side",
        )
    if width * height > limits.max_pixels:
        raise Refusal(
            "too_large",
            f"a video of {width} x {height} = {width * height} pixels is over the limit of"
            f" {limits.max_pixels} pixels",
        )


def check_count(num_frames: int, limits: DecodingLimits) -> None:
    """Check a number of frames. Counting may have stopped at the first frame over the limit."""
    if num_frames > limits.max_frames:
        raise Refusal("too_large", f"a video of more than the limit of {limits.max_frames} frames")
    if num_frames < 1:
        raise Refusal("invalid", "the video has no frames")


def check_duration(duration_s: float, limits: DecodingLimits) -> None:
    # A duration that is NaN is over every limit.
    if not duration_s <= limits.max_video_s:
        raise Refusal(
            "too_large",
            f"a video of {duration_s:g} s is over the limit of {limits.max_video_s:g} s",
        )
