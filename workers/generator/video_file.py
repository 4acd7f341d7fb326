"""MP4 files of videos, by PyAV: the same bytes for the same pixels."""

import io

import av
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from workers.generator.core.denoising import Pixels

QUALITY = {"crf": "18", "preset": "medium"}
"""Settings of x264, with losses that are hardly visible."""


def to_mp4(pixels: Pixels, fps: int) -> bytes:
    """Return the file of a video, [frames, height, width, 3] with even sides."""
    file = io.BytesIO()
    # The flag leaves out the versions of libraries, and one thread has no other order of work.
    with av.open(file, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=fps, options=QUALITY | {"threads": "1"})
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.thread_count = 1
        # Players guess the colours of other files by their size.
        context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        for picture in pixels:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
