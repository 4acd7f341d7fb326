"""Packets of containers, by PyAV. Containers and codecs are restricted to lists.

FFmpeg reads hundreds of formats, and most of its readers are hardly tested with hostile files. Here
the format is recognized by the first bytes and passed to FFmpeg, which would otherwise try all
formats. References in a file to other files or URLs are not opened.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import av
import av.error
import av.subtitles.stream  # PyAV would import it later, inside the sandbox.
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard, Disposition
from av.video.stream import VideoStream

from shared.decoding.refusal import Refusal
from workers.renderer.decoding.containers import Bytes, Container, MemoryFile

VIDEO_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg"})
AUDIO_CODECS = frozenset({"aac", "mp3", "mp3float", "opus", "vorbis", "flac"}) | {
    f"pcm_{kind}" for kind in ("u8", "s16le", "s16be", "s24le", "s24be", "s32le", "f32le", "f64le")
}
_OPTIONS = {
    "codec_whitelist": ",".join(sorted(VIDEO_CODECS | AUDIO_CODECS)),
    "protocol_whitelist": "",
}

AnyStream = TypeVar("AnyStream", VideoStream, AudioStream)


def open_container(data: Bytes, container: Container, **decoder: str) -> InputContainer:
    """Open a file. Raises FFmpegError.

    FFmpeg decodes the first frames, with the options of `decoder`, to get properties that are not
    in the header.
    """
    options = {**_OPTIONS, "format_whitelist": container.name, **decoder}
    return av.open(MemoryFile(data), "r", container.name, options)


def select_stream(
    container: InputContainer,
    streams: Iterable[AnyStream],
    codecs: frozenset[str],
    medium: str,
    max_pixels: int,
) -> AnyStream:
    """Return the first stream, and make the container skip all others.

    An attached picture, such as the cover of an album, does not count as a video.
    """
    for stream in streams:
        if not stream.disposition & Disposition.attached_pic:
            break
    else:
        raise Refusal("invalid", f"the file has no {medium}")
    context = stream.codec_context
    # `codec_whitelist` does not apply to the decoder that PyAV opens.
    if context is None or context.name not in codecs:
        name = "an unknown codec" if context is None else f"the codec {context.name}"
        raise Refusal("unsupported", f"a {medium} of {name} is not accepted")
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all
    # Threads would not be counted by the limits, and the sandbox allows none.
    context.thread_count = 1
    context.options = {"max_pixels": str(max_pixels)}
    return stream


def decode_packets(packets: "Iterable[Packet[AnyStream]]") -> Iterator[Any]:
    """Yield the frames of packets, and skip packets that cannot be decoded."""
    for packet in packets:
        try:
            yield from packet.decode()
        except MemoryError:
            raise
        except (av.error.FFmpegError, IndexError):
            continue
