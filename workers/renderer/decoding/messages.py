"""Messages between the renderer and a decoder process. Pure.

A decoder works on a stranger's bytes, so the renderer decodes its replies as strictly as a client's
requests, and believes no number in them. Pixels and samples are not in the messages: they are in
memory that both sides have mapped.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

MAX_MESSAGE_BYTES = 2**17
"""A list of frames to read is the longest message."""
NUM_SLOTS = 2
"""Pieces in memory: the renderer processes one while the next is decoded."""
PIECE_SAMPLES = 2**18
"""Most samples of a piece of sound."""

Count = Annotated[int, Meta(ge=0, le=2**48)]
Size = Annotated[int, Meta(ge=1, le=2**31)]
Kind = Literal["frames", "samples"]
"""What is read: the frames of a video, or the samples of a sound."""
MEDIA: Mapping[Kind, str] = {"frames": "video", "samples": "sound"}
"""Words for errors."""
Fault = Literal["invalid", "exceeded", "too_large", "unsupported"]
"""`exceeded` is a limit on the process."""


class DecodingLimits(Struct, frozen=True):
    """Limits on one file, and on the process that decodes it."""

    max_frames: int
    """Limit on the frames of a video file."""
    max_pixels: int
    """Limit on the pixels of one frame."""
    max_side: int
    """Limit on the width and the height of a frame."""
    max_video_s: float
    """Limit on the duration of a video."""
    max_audio_s: float
    """Limit on the duration of a sound."""
    max_cpu_s: int
    """Limit on the processor time of one file."""
    max_memory_mib: int
    """Limit on the address space of the process."""


class Job(Struct, frozen=True):
    """Probe the file in the second descriptor; what is read goes to the third.

    The decoder answers on the first.
    """

    kind: Kind
    limits: DecodingLimits


class ReadFrames(Struct, frozen=True, tag="frames"):
    """Read these frames, which ascend, as pieces of one frame each."""

    indexes: Annotated[list[Count], Meta(min_length=1)]


class ReadSamples(Struct, frozen=True, tag="samples"):
    """Read samples: one channel, which is the mean of all, at this rate."""

    rate: int
    num_skipped: int = 0
    """Pieces that another decoder has read before."""


class Proceed(Struct, frozen=True, tag="proceed"):
    """The older of the two pieces in memory may be overwritten."""


Order = ReadFrames | ReadSamples | Proceed


class VideoProbe(Struct, frozen=True, tag="video_probe"):
    """What a video's header and packets say, within the limits."""

    width: Size
    height: Size
    num_frames: Size
    """Frames, counted."""
    fps: Annotated[float, Meta(gt=0)] | None
    """Average number of frames per second; None if nothing in the file says it."""
    format: str
    """Container and codec, for people."""
    is_sequence: bool = False
    """Whether the sender has chosen the frames."""
    has_sound: bool = False
    """Whether there is a stream of sound, which may still be refused."""


class AudioProbe(Struct, frozen=True, tag="audio_probe"):
    """What a sound's header says, within the limits."""

    rate: Size
    """Samples per second of each channel."""
    num_channels: Size
    num_samples: Count
    """Samples of each channel. Those that are read may be fewer."""
    format: str
    """Container and codec, for people."""


Probe = VideoProbe | AudioProbe


class Piece(Struct, frozen=True, tag="piece"):
    """The next piece is in memory: a frame, or some samples."""

    num_values: Count
    """Bytes of pixels, or samples."""


class Done(Struct, frozen=True, tag="done"):
    """There are no more pieces."""


class Refused(Struct, frozen=True, tag="refused"):
    """The file is refused."""

    fault: Fault
    message: str


Reply = VideoProbe | AudioProbe | Piece | Done | Refused

encode: Callable[[Job | Order | Reply], bytes] = msgspec.msgpack.Encoder().encode
decode_job: Callable[[bytes], Job] = msgspec.msgpack.Decoder(Job).decode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode
