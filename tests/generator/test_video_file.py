"""MP4 files of videos, decoded again by PyAV."""

import io
import time

import av
import numpy as np
import pytest

from workers.generator.video_file import to_mp4


def moving(frames: int = 9) -> np.ndarray:
    """Return smooth pixels that change, [frames, 32, 48, 3]."""
    time, row, column = np.mgrid[0:frames, 0:32, 0:48]
    return np.stack([column * 5, row * 7, 20 + time * 20], -1).astype(np.uint8)


def test_the_frames_of_a_file_are_close_to_the_pixels() -> None:
    with av.open(io.BytesIO(to_mp4(moving(), 24)), "r") as container:
        stream = container.streams.video[0]
        assert (float(stream.average_rate or 0), stream.width, stream.height) == (24.0, 48, 32)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    difference = np.abs(np.stack(frames).astype(int) - moving())
    assert difference.max() <= 16
    assert difference.mean() < 4


def test_equal_pixels_have_equal_files(monkeypatch: pytest.MonkeyPatch) -> None:
    file = to_mp4(moving(), 16)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert to_mp4(moving(), 16) == file
    assert to_mp4(moving() + np.uint8(8), 16) != file
    # The names of the libraries' versions would be in the file.
    assert b"Lavf" not in file
    assert len(to_mp4(moving(1), 1)) > 0
