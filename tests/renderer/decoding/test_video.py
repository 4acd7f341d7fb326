"""Frames of videos: exactly the requested ones, equal to the frames of a decoder that reads all."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ImageSequence

from shared.errors import InvalidMedia
from shared.protocol.multimodal import content_hash
from tests.renderer.decoding import files
from tests.renderer.decoding.files import av
from tests.renderer.decoding.reading import FIELD, Reader

INDEXES = [0, 3, 3, 11, 12, 13, 30, 31, 46, 47]
KINDS = [
    ("libx264", "mp4"),
    ("libx264", "mov"),
    ("libx264", "matroska"),
    ("libx264", "avi"),
    ("libx265", "mp4"),
    ("libsvtav1", "mp4"),
    ("libvpx", "webm"),
    ("libvpx-vp9", "webm"),
    ("mpeg4", "avi"),
    ("mjpeg", "mov"),
]


def all_frames(data: bytes) -> list[NDArray[np.uint8]]:
    with av.open(io.BytesIO(data)) as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]


@pytest.mark.parametrize(("codec", "container"), KINDS)
def test_frames_equal_the_frames_of_a_decoder_that_reads_all(
    reader: Reader, codec: str, container: str
) -> None:
    data = files.video(codec, container)
    expected = all_frames(data)
    probe, frames = reader.video(data, INDEXES)
    assert (probe.num_frames, probe.fps) == (len(expected), 24) == (48, 24)
    assert (probe.width, probe.height) == (files.WIDTH, files.HEIGHT)
    assert len(frames) == len(INDEXES)
    for index, frame in zip(INDEXES, frames, strict=True):
        np.testing.assert_array_equal(frame, expected[index], err_msg=str(index))


def test_encoders_of_the_tests_make_no_real_time_process() -> None:
    files.video("libsvtav1")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_frame_is_decoded_from_the_key_frame_before_it(reader: Reader) -> None:
    # All frames are damaged, except the first and the frames from the last two key frames on.
    data = bytearray(files.video())
    with av.open(io.BytesIO(bytes(data))) as opened:
        packets = [packet for packet in opened.demux(video=0) if packet.size]
    keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    for packet in packets[1 : keys[-2]]:
        assert packet.pos is not None
        data[packet.pos + 4 : packet.pos + packet.size] = bytes(packet.size - 4)
    _, frames = reader.video(bytes(data), [45, 47])
    expected = all_frames(files.video())
    np.testing.assert_array_equal(frames[0], expected[45])
    np.testing.assert_array_equal(frames[1], expected[47])


@pytest.mark.parametrize(("num_damaged", "is_refused"), [(1, False), (4, True)])
def test_a_neighbour_replaces_few_damaged_frames(
    reader: Reader, num_damaged: int, is_refused: bool
) -> None:
    data = bytearray(files.video("mjpeg", "mov"))
    with av.open(io.BytesIO(bytes(data))) as opened:
        packets = [packet for packet in opened.demux(video=0) if packet.size]
    for packet in packets[7 : 7 + num_damaged]:
        assert packet.pos is not None
        data[packet.pos : packet.pos + packet.size] = bytes(packet.size)
    if is_refused:
        with pytest.raises(InvalidMedia, match="damaged"):
            reader.video(bytes(data), range(48))
        return
    _, frames = reader.video(bytes(data), range(48))
    expected = all_frames(files.video("mjpeg", "mov"))
    expected[7] = expected[8]
    np.testing.assert_array_equal(frames, expected)


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_a_damaged_frame_of_avi_is_no_end(reader: Reader, codec: str) -> None:
    """The frames of H.264 have no times there, so that they are counted."""
    data = bytearray(files.video(codec, "avi"))
    with av.open(io.BytesIO(bytes(data))) as opened:
        packets = [packet for packet in opened.demux(video=0) if packet.size]
    damaged = packets[7]
    assert damaged.pos is not None
    data[damaged.pos : damaged.pos + damaged.size] = bytes(damaged.size)
    _, frames = reader.video(bytes(data), [0, 20, 47])
    expected = all_frames(files.video(codec, "avi"))
    assert len(frames) == 3
    np.testing.assert_array_equal(frames[0], expected[0])
    np.testing.assert_array_equal(frames[2], expected[47])


@pytest.mark.parametrize("turned", [90, 180, -90])
def test_frames_of_a_turned_camera_are_upright(reader: Reader, turned: int) -> None:
    data = files.video(turned=turned)
    plain = all_frames(data)[5]
    probe, [frame] = reader.video(data, [5])
    assert (probe.height, probe.width) == frame.shape[:2]
    np.testing.assert_array_equal(frame, np.rot90(plain, turned // 90))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated_images_are_videos(reader: Reader, kind: str) -> None:
    data = files.animated(kind)
    probe, frames = reader.video(data, [0, 2, 5])
    assert (probe.num_frames, probe.fps, probe.is_sequence) == (6, 4.0, False)
    images = [image.convert("RGB") for image in ImageSequence.Iterator(files.opened(data))]
    for index, frame in zip([0, 2, 5], frames, strict=True):
        np.testing.assert_array_equal(frame, np.asarray(images[index]))
        if kind != "GIF":
            np.testing.assert_array_equal(frame, files.picture(20 * index))


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_the_memory_of_a_refused_file_is_free(reader: Reader, num_read: int) -> None:
    """Also while a reference to the error exists, because its traceback holds a frame."""
    assert num_kib_shared() == 0
    with pytest.raises(InvalidMedia, match="refused") as caught:
        read_and_refuse(reader, num_read)
    assert num_kib_shared() == 0
    assert caught.tb is not None


def read_and_refuse(reader: Reader, num_read: int) -> None:
    data = files.video()
    with reader.pool.open("frames", data, content_hash(data), FIELD) as decoding:
        decoding.probe_video()
        frames = decoding.read_frames(range(4))
        sums = [next(frames).sum() for _ in range(num_read)]
        assert (num_kib_shared() > 0) == bool(sums)
        raise InvalidMedia("refused")


def num_kib_shared() -> int:
    """Return how much of this process is memory that decoders share with it."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    ours = [line for part in maps if "memfd:pagemill" in part for line in part.splitlines()]
    return sum(int(line.split()[1]) for line in ours if line.startswith("Rss:"))


def test_a_sequence_of_jpeg_files_is_a_video_without_a_rate(reader: Reader) -> None:
    pictures = [files.jpeg(files.picture(number)) for number in range(5)]
    probe, frames = reader.video(files.sequence(pictures), range(5))
    assert (probe.num_frames, probe.fps, probe.is_sequence) == (5, None, True)
    for data, frame in zip(pictures, frames, strict=True):
        np.testing.assert_array_equal(frame, np.asarray(files.opened(data)))
