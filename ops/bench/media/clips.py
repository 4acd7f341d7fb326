"""Files for the measurements: a clip, speech-like sound, and files that are meant to harm."""

import io
import itertools
import struct
from fractions import Fraction

import av
import numpy as np
import soundfile

_numbers = itertools.count()
FPS = 30
SIZE = (1280, 720)


def make_clip(seconds: int = 10, size: tuple[int, int] = SIZE) -> bytes:
    """Return an MP4 of H.264 with a square that moves over a noisy ground."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    ground = np.stack([x % 256, y % 256, (x + y) // 8 % 256], axis=-1).astype(np.uint8) // 2
    noise = np.random.default_rng(0).integers(0, 40, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=FPS, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(FPS * seconds):
            picture = np.roll(ground, 3 * number, axis=1) + np.roll(noise, number, axis=0)
            left = 3 * number % (width - height // 4)
            picture[height // 4 : height // 2, left : left + height // 4] = (200, 30, 30)
            frame = av.VideoFrame.from_ndarray(picture, "rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def renamed(clip: bytes) -> bytes:
    """Return the same MP4 with another hash: a box at its end that every reader skips."""
    return clip + struct.pack(">I4sQ", 16, b"free", next(_numbers))


def padded(clip: bytes, num_bytes: int) -> bytes:
    """Return the same MP4 in a file of a given number of bytes."""
    rest = num_bytes - len(clip)
    return clip + struct.pack(">I4s", rest, b"free") + bytes(rest - 8)


def make_speech(seconds: int = 10, rate: int = 44_100) -> bytes:
    """Return a WAV of two channels, of harmonics that come and go."""
    time = np.arange(seconds * rate) / rate
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = np.sum([np.sin(k * phase) / k for k in range(1, 12)], axis=0)
    spoken = 0.1 * voice * (np.sin(2 * np.pi * 1.3 * time) > -0.3)
    file = io.BytesIO()
    soundfile.write(file, np.stack([spoken, spoken], axis=-1), rate, format="WAV")
    return file.getvalue()


def make_bombs() -> dict[str, bytes]:
    """Return files that are refused, by what they are."""
    small = make_clip(1, (64, 48))
    return {
        "ten hours": _stretched(small, 36_000, Fraction(1)),
        "very many frames": _stretched(small, 36_001, Fraction(1, FPS)),
        "8192 x 8192": _huge(),
    }


def _stretched(clip: bytes, num_frames: int, seconds_each: Fraction) -> bytes:
    """Return a clip of which the last packet comes again and again."""
    file = io.BytesIO()
    with av.open(io.BytesIO(clip), "r") as source, av.open(file, "w", format="mp4") as output:
        stream = source.streams.video[0]
        packets = [bytes(packet) for packet in source.demux(stream) if packet.size]
        target = output.add_stream_from_template(stream)
        for number in range(num_frames):
            packet = av.Packet(packets[min(number, len(packets) - 1)])
            packet.stream, packet.time_base = target, seconds_each
            packet.pts = packet.dts = number
            packet.is_keyframe = number == 0
            output.mux(packet)
    return file.getvalue()


def _huge() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=1, options={"preset": "ultrafast"})
        stream.width = stream.height = 8192
        stream.pix_fmt = "yuv420p"
        black = av.VideoFrame.from_ndarray(np.zeros((8192 * 3 // 2, 8192), np.uint8), "yuv420p")
        black.pts, black.time_base = 0, Fraction(1)
        output.mux(stream.encode(black))
        output.mux(stream.encode())
    return file.getvalue()
