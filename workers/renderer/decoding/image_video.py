"""Videos that Pillow reads: sequences of JPEG files, and animated GIF, WebP and PNG."""

import base64
import binascii
import io
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image, MpoImagePlugin, TiffImagePlugin, WebPImagePlugin

from shared.decoding import pictures
from shared.decoding.refusal import Refusal
from shared.decoding.still_image import read_still_image
from workers.renderer.decoding import video_file
from workers.renderer.decoding.animations import count_animation
from workers.renderer.decoding.containers import Bytes
from workers.renderer.decoding.messages import DecodingLimits, VideoProbe
from workers.renderer.decoding.video_file import Pixels

# The constant of this name in `shared.protocol.requests`, which no decoder imports.
SEQUENCE_HEAD = b"data:video/jpeg;base64,"
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG")
MAX_ANIMATED_PIXELS = 2**29
"""Limit on the pixels of all frames, because each frame is drawn over the previous frame."""

Image.preinit()
PRELOADED = (MpoImagePlugin, TiffImagePlugin, WebPImagePlugin)
"""Modules that Pillow would import at their first use, which the sandbox does not allow."""
# Pillow warns about damage to a file, which counts as an error.
warnings.filterwarnings("error", module=r"PIL\.")
# The limits here check the header's sizes, and their errors name the sizes.
Image.MAX_IMAGE_PIXELS = None


class JpegSequence:
    """JPEG files in base64, separated by commas. The sender has already chosen the frames."""

    def __init__(self, data: Bytes, limits: DecodingLimits) -> None:
        text = bytes(data[len(SEQUENCE_HEAD) :])
        num_frames = text.count(b",") + 1
        video_file.check_count(num_frames, limits)
        self._texts = text.split(b",")
        self._limits = limits
        first = self._upright(0)
        self._size = first.size
        self.probe = VideoProbe(*first.size, num_frames, None, "JPEG sequence", is_sequence=True)

    def frames(self, indexes: Sequence[int]) -> Iterator[Pixels]:
        for index in indexes:
            image = self._upright(index)
            if image.size != self._size:
                raise Refusal(
                    "invalid",
                    f"frame {index} of the video is {image.width} x {image.height}, and the first"
                    f" one {self._size[0]} x {self._size[1]}",
                )
            yield np.asarray(image)

    def _upright(self, index: int) -> Image.Image:
        """Return a frame. Raises Refusal."""
        not_jpeg = Refusal("invalid", f"frame {index} of the video is not a JPEG file in base64")
        try:
            still = read_still_image(base64.b64decode(self._texts[index], validate=True))
            if still is None:
                raise not_jpeg
            image = Image.open(io.BytesIO(still.file), formats=["JPEG"])
        except (binascii.Error, OSError, ValueError):
            raise not_jpeg from None
        except Refusal as refusal:
            raise Refusal(refusal.fault, f"frame {index} of the video: {refusal}") from None
        video_file.check_size(*image.size, self._limits)
        still.check_scans(image.size)
        return pictures.to_rgb(pictures.to_upright(image, still.orientation))


class AnimatedImage:
    def __init__(self, data: Bytes, limits: DecodingLimits) -> None:
        self._file = bytes(data[:])
        image = self._open()
        video_file.check_size(*image.size, limits)
        animation = count_animation(self._file, limits.max_frames + 1)
        num_frames, duration_s = animation.num_frames, animation.duration_s
        video_file.check_count(num_frames, limits)
        video_file.check_duration(duration_s, limits)
        num_pixels = num_frames * image.width * image.height
        if num_pixels > MAX_ANIMATED_PIXELS:
            raise Refusal(
                "too_large",
                f"an animated image of {num_frames} frames of {image.width} x {image.height} ="
                f" {num_pixels} pixels is over the limit of {MAX_ANIMATED_PIXELS} pixels",
            )
        fps = num_frames / duration_s if duration_s > 0 else None
        self.probe = VideoProbe(*image.size, num_frames, fps, f"animated {image.format}")

    def frames(self, indexes: Sequence[int]) -> Iterator[Pixels]:
        image = self._open()
        for index in indexes:
            image.seek(index)
            yield np.asarray(pictures.to_rgb(image))

    def _open(self) -> Image.Image:
        return Image.open(io.BytesIO(self._file), formats=ANIMATED_FORMATS)
