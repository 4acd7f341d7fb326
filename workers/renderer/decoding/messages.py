"""Messages between the renderer and a decoder process. Pure.

A decoder works on untrusted bytes, so the renderer decodes its replies as strictly as a client's
requests, and checks every number in them. Pixels and samples are not in the messages: they are in
memory that both sides have mapped.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shared.decoding.refusal import Fault

MAX_MESSAGE_BYTES = 2**17
"""Limit on the size of a message. The longest message is a list of frames to read."""
NUM_SLOTS = 2
"""Pieces in memory: the renderer processes one while the next is decoded."""
PIECE_SAMPLES = 2**18
"""Largest number of samples in a piece of sound."""

Count = Annotated[int, Meta(ge=0, le=2**48)]
Size = Annotated[int, Meta(ge=1, le=2**31)]
Kind = Literal["frames", "samples", "pages"]
"""Kind of a job: reading the frames of a video, the samples of a sound, or pages of a document."""
MEDIA: Mapping[Kind, str] = {"frames": "video", "samples": "sound", "pages": "document"}
"""Names of the media in error messages."""


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
    max_page_pixels: int
    """Limit on the pixels of the image of a page."""
    max_cpu_s: int
    """Limit on the processor time of one job."""
    max_memory_mib: int
    """Limit on the address space of the process."""


class Job(Struct, frozen=True):
    """Order to probe the file in the second descriptor.

    Results are written to the memory of the third descriptor, and replies to the first.
    """

    kind: Kind
    limits: DecodingLimits


class ReadFrames(Struct, frozen=True, tag="frames"):
    """Order to read these frames, in ascending order, as pieces of one frame each."""

    indexes: Annotated[list[Count], Meta(min_length=1)]


class ReadSamples(Struct, frozen=True, tag="samples"):
    """Order to read samples at this rate: one channel, which is the mean of all channels."""

    rate: int
    num_skipped: int = 0
    """Number of pieces to skip, because an earlier decoder has read them."""


class ReadPages(Struct, frozen=True, tag="pages"):
    """Order to read these pages, as pieces of one image each."""

    numbers: list[Count]
    dpi: int


class ReadTexts(Struct, frozen=True, tag="texts"):
    """Order to read the text of these pages, as pieces of UTF-8 of one page each."""

    numbers: list[Count]


class Proceed(Struct, frozen=True, tag="proceed"):
    """The older of the two pieces in memory may be overwritten."""


Order = ReadFrames | ReadSamples | ReadPages | ReadTexts | Proceed


class VideoProbe(Struct, frozen=True, tag="video_probe"):
    """Properties of a video from its header and packets, within the limits."""

    width: Size
    height: Size
    num_frames: Size
    """Number of frames, counted from the packets."""
    fps: Annotated[float, Meta(gt=0)] | None
    """Average number of frames per second; None if the file does not contain it."""
    format: str
    """Readable names of container and codec."""
    is_sequence: bool = False
    """Whether the sender has chosen the frames."""
    has_sound: bool = False
    """Whether there is a sound stream. It may still be refused."""


class AudioProbe(Struct, frozen=True, tag="audio_probe"):
    """Properties of a sound from its header, within the limits."""

    rate: Size
    """Samples per second of each channel."""
    num_channels: Size
    num_samples: Count
    """Samples of each channel. Fewer may be read."""
    format: str
    """Readable names of container and codec."""


class DocumentProbe(Struct, frozen=True, tag="document_probe"):
    """Properties of a document."""

    num_pages: Size


Probe = VideoProbe | AudioProbe | DocumentProbe


class Piece(Struct, frozen=True, tag="piece"):
    """The next piece is in memory: an image, some samples, or a text."""

    shape: Annotated[list[Count], Meta(min_length=1, max_length=3)]
    """[height, width, 3] of an image, or the number of samples or bytes."""


class Done(Struct, frozen=True, tag="done"):
    """There are no more pieces."""


class Refused(Struct, frozen=True, tag="refused"):
    """The file is refused."""

    fault: Fault
    message: str


Reply = VideoProbe | AudioProbe | DocumentProbe | Piece | Done | Refused

encode: Callable[[Job | Order | Reply], bytes] = msgspec.msgpack.Encoder().encode
decode_job: Callable[[bytes], Job] = msgspec.msgpack.Decoder(Job).decode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode
