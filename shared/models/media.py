"""Decoded media: the form in which a file reaches the layouts of the model families.

An image is decoded as a whole. A video or a sound is only probed at first: the layout plans from
the probe what it needs, and `read` decodes no more than the plan says.
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
    """Hash of the file that the image was decoded from."""
    modality: ClassVar[Modality] = IMAGE


@dataclass(frozen=True, slots=True)
class VideoProbe:
    """A video before any of its frames is decoded."""

    num_frames: int
    """Frames in the file: counted, because a header may lie."""
    fps: float | None
    """Average rate; None if the file has no times."""
    width: int
    height: int
    is_sequence: bool = False
    """Whether the sender has chosen the frames, and all of them are wanted (`video/jpeg`)."""


@dataclass(frozen=True, slots=True)
class FramePlan:
    """The frames to decode, and the size that each is given."""

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
    """Side of the square that is cut from the middle of a resized frame; None for all of it."""

    @property
    def num_bytes(self) -> int:
        """Size of all frames as they are read, with 3 channels."""
        size = self.height * self.width if self.crop is None else self.crop**2
        return 3 * len(self.indexes) * size


Frame = NDArray[np.uint8]
"""One frame as planned: [channels, height, width], RGB, upright."""


@dataclass(frozen=True, slots=True)
class AudioProbe:
    """A sound before it is decoded, by the word of its header."""

    seconds: float
    rate: int
    """Samples per second of each channel."""
    num_channels: int


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The form that a layout needs of a sound."""

    rate: int
    """Samples per second after resampling."""
    num_tokens: int
    """Number of embeddings, if the header is right."""
    max_samples: int | None = None
    """Number of samples behind which nothing is needed; None to read all."""


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    probe: AudioProbe
    read: Callable[[SamplePlan], Iterator[NDArray[np.float32]]]
    """Yields consecutive pieces of the samples: one channel, the mean of all, at the planned rate.

    Raises a RequestError, also after the first piece.
    """
    source_hash: str
    modality: ClassVar[Modality] = AUDIO


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    probe: VideoProbe
    read: Callable[[FramePlan], Iterator[Frame]]
    """Yields one frame for each planned index; each is decoded, resized and dropped in turn.

    Raises a RequestError, of which the first frame may be the cause or any later one.
    """
    source_hash: str
    sound: DecodedAudio | None = None
    """The sound of the video, where it is wanted and there is any."""
    modality: ClassVar[Modality] = VIDEO


DecodedMedia = DecodedImage | DecodedVideo | DecodedAudio
"""The union of all modalities' decoded forms; each modality adds a class of its own."""
