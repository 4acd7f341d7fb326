"""Bugs of videos: the frames that are read, and the keys of cached clips."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import wrap


@bug("renderer", "clips", "I3")
def frames_one_behind() -> None:
    """The frame after each requested one is read."""
    from workers.renderer.decoding.decoding import Decoding

    @wrap(Decoding, "read_frames")
    def read_next(read: Any, self: Decoding, indexes: Sequence[int]) -> Any:
        last = self.probe_video().num_frames - 1
        return read(self, [min(index + 1, last) for index in indexes])


@bug("renderer", "clips", "I3")
def clips_cached_without_their_sampling() -> None:
    from shared.protocol.multimodal import DEFAULT_SAMPLING, FrameSampling
    from workers.renderer.processing.inputs import Input

    @wrap(Input, "hash")
    def without_sampling(
        hash_media: Any, self: Input, source_hash: str, tenant: str, sampling: FrameSampling
    ) -> Any:
        return hash_media(self, source_hash, tenant, DEFAULT_SAMPLING)


@bug("renderer", "clips", "I3")
def last_frames_swapped() -> None:
    """The last two frames of a decoder are read from memory in the wrong order."""
    from workers.renderer.decoding.decoding import Decoding

    @wrap(Decoding, "read_frames")
    def swapped(read: Any, self: Decoding, indexes: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        frames = [frame.copy() for frame in read(self, indexes)]
        return iter([*frames[:-2], *reversed(frames[-2:])])
