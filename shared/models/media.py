"""Decoded media: input of the layouts of the model families.

An image is decoded as a whole. A video or a sound is only probed at first. The layout plans from
the probe which parts it needs, and `read` decodes only the planned parts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, Modality


@dataclass(frozen=True, slots=True)
class DecodedImage:
    image: Image.Image
    """RGB, upright."""
    source_hash: str
    """Hash of the image's file."""
    modality: ClassVar[Modality] = IMAGE


@dataclass(frozen=True, slots=True)
class VideoProbe:
    """A video before any of its frames is decoded."""

    num_frames: int
    """Number of frames in the file, counted and not read from the header."""
    fps: float | None
    """Average rate; None if the file has no times."""
    width: int
    height: int
    is_sequence: bool = False
    """Whether the sender has already chosen the frames, so that all are used (`video/jpeg`)."""


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Frames to decode, and their size after resizing."""

    indexes: tuple[int, ...]
    """Ascending; an index may repeat."""
    height: int
    width: int
    num_tokens: int
    """Number of embeddings of the whole video."""
    fps: float
    """Rate of the planned frames."""
    times: tuple[float, ...] = ()
    """Time of each planned frame in seconds, for the layouts that need it."""
    crop: int | None = None
    """Side of the square that is cut from the middle of a resized frame; None for no crop."""

    @property
    def num_bytes(self) -> int:
        """Size of all resized frames, with 3 channels."""
        size = self.height * self.width if self.crop is None else self.crop**2
        return 3 * len(self.indexes) * size


Frame = NDArray[np.uint8]
"""One frame as planned: [channels, height, width], RGB, upright."""


@dataclass(frozen=True, slots=True)
class AudioProbe:
    """A sound before it is decoded, described by its header."""

    seconds: float
    rate: int
    """Samples per second of each channel."""
    num_channels: int


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Form of a sound that a layout needs."""

    rate: int
    """Samples per second after resampling."""
    num_tokens: int
    """Number of embeddings, if the header is right."""
    max_samples: int | None = None
    """Limit on the samples that are used; None to use all."""


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    probe: AudioProbe
    read: Callable[[SamplePlan], Iterator[NDArray[np.float32]]]
    """Yields consecutive pieces of the samples: one channel, the mean of all, at the planned rate.

    May raise a RequestError after any piece.
    """
    source_hash: str
    modality: ClassVar[Modality] = AUDIO


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    probe: VideoProbe
    read: Callable[[FramePlan], Iterator[Frame]]
    """Yields one frame for each planned index; each is decoded, resized and dropped in turn.

    May raise a RequestError at any frame.
    """
    source_hash: str
    sound: DecodedAudio | None = None
    """Sound of the video, if the request uses it and the video has one."""
    modality: ClassVar[Modality] = VIDEO


DecodedMedia = DecodedImage | DecodedVideo | DecodedAudio
"""Decoded media of any modality. Each modality has a separate class."""
