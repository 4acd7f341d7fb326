"""Videos and sounds for the tests of decoders, made by PyAV, Pillow and soundfile."""

import base64
import functools
import io
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image

av = pytest.importorskip("av", reason="needs PyAV")

WIDTH, HEIGHT = 64, 48


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """Return a frame that no other number has."""
    y, x = np.mgrid[0:height, 0:width]
    planes = (x + 3 * number) % 256, (y + 5 * number) % 256, np.full_like(x, 5 * number % 256)
    return np.stack(planes, axis=-1).astype(np.uint8)


@functools.cache
def video(
    codec: str = "libx264",
    container: str = "mp4",
    num_frames: int = 48,
    fps: int = 24,
    turned: int = 0,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    gop: int = 12,
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps, options=_options(codec, gop))
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), "rgb24")
            frame = frame.reformat(format=stream.pix_fmt)
            frame.pts, frame.time_base = number, Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    if codec == "libsvtav1":
        # As root, this encoder makes the process that calls it a real-time one. Its children that
        # compute would then keep the processors from all other tests.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return file.getvalue()


@functools.cache
def sounding(num_frames: int = 48, fps: int = 24, seconds: float = 2.0, tone: int = 440) -> bytes:
    """Return an MP4 with pictures, and a sine as its sound."""
    time = np.arange(int(seconds * 44_100)) / 44_100
    tones = (0.5 * np.sin(2 * np.pi * tone * time)).astype(np.float32)[None]
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        frames = output.add_stream("libx264", rate=fps)
        frames.width, frames.height, frames.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        audio = output.add_stream("aac", rate=44_100, layout="mono")
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(number), "rgb24")
            frame = frame.reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            output.mux(frames.encode(frame))
        sound = av.AudioFrame.from_ndarray(tones, "fltp", "mono")
        sound.sample_rate, sound.pts = 44_100, 0
        output.mux(audio.encode(sound))
        output.mux(audio.encode())
        output.mux(frames.encode())
    return file.getvalue()


def _options(codec: str, gop: int) -> dict[str, str]:
    options = {"g": str(gop)}
    if codec == "libx265":
        options["x265-params"] = "log-level=none"
    if codec == "libsvtav1":
        options["preset"] = "12"
    return options


def repeated(
    source: bytes, num_frames: int, seconds_each: Fraction, container: str = "mp4"
) -> bytes:
    """Return a video with the packets of another one, the last of them again and again."""
    file = io.BytesIO()
    with av.open(io.BytesIO(source)) as template, av.open(file, "w", format=container) as output:
        stream = template.streams.video[0]
        packets = [packet for packet in template.demux(stream) if packet.size]
        target = output.add_stream_from_template(stream)
        for number in range(num_frames):
            packet = av.Packet(bytes(packets[min(number, len(packets) - 1)]))
            packet.stream, packet.time_base = target, seconds_each
            packet.pts = packet.dts = number
            packet.duration = 1
            packet.is_keyframe = number == 0
            output.mux(packet)
    return file.getvalue()


def animated(kind: str, num_frames: int = 6, **options: object) -> bytes:
    images = [Image.fromarray(picture(20 * number)) for number in range(num_frames)]
    if kind == "WEBP":
        options["lossless"] = True
    file = io.BytesIO()
    images[0].save(
        file, kind, save_all=True, append_images=images[1:], duration=250, loop=0, **options
    )
    return file.getvalue()


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def sequence(files: Sequence[bytes]) -> bytes:
    """Return the data: URL of a sequence of JPEG files, which is its file."""
    return b"data:video/jpeg;base64," + b",".join(map(base64.b64encode, files))


def noise(num_samples: int, num_channels: int = 2, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (0.1 * rng.standard_normal((num_samples, num_channels))).astype(np.float32)


def sound(samples: NDArray[np.float32], rate: int, **options: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **{"format": "WAV", "subtype": "FLOAT", **options})
    return file.getvalue()


def without_length(flac: bytes) -> bytes:
    """Return a FLAC file as it is written to a stream: its header has no number of samples."""
    head, rest = int.from_bytes(flac[18:26], "big"), flac[26:]
    return flac[:18] + (head >> 36 << 36).to_bytes(8, "big") + rest


def packed_sound(
    codec: str, container: str, samples: NDArray[np.float32], rate: int, **options: str
) -> bytes:
    """Return samples in a container of PyAV, [samples, channels]."""
    layout = {1: "mono", 2: "stereo"}[samples.shape[1]]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout, options=dict(options))
        values: Mapping[str, NDArray[np.generic]] = {
            "fltp": np.ascontiguousarray(samples.T),
            "flt": samples.reshape(1, -1),
            "s16": (samples.reshape(1, -1) * 2**15).astype(np.int16),
        }
        kind = stream.format.name
        frame = av.AudioFrame.from_ndarray(values[kind], kind, layout)
        frame.sample_rate, frame.pts = rate, 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()
