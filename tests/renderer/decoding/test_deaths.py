"""Decoders that die: the file is refused, and nothing else is disturbed."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shared.config.schema import RendererConfig
from shared.errors import InvalidMedia, UnsupportedContent, WorkerFailure
from shared.models.media import DecodedVideo, FramePlan
from shared.protocol.multimodal import AUDIO, VIDEO, FrameSampling, Modality
from tests.renderer.decoding import files
from tests.renderer.decoding.reading import FIELD, LIMITS, Reader
from tests.renderer.threads import in_thread
from workers.renderer.decoding import pool as pools
from workers.renderer.decoding.pool import DecoderPool
from workers.renderer.media.decoders import MediaDecoders

SEQUENCE = files.sequence([files.jpeg(files.picture(number)) for number in range(20)])


@pytest.fixture(scope="module")
def dying() -> Iterator[Reader]:
    limits = replace(LIMITS, max_cpu_s=1, max_memory_mib=1024)
    pool = DecoderPool(limits, 2, "tests.renderer.decoding.dying")
    yield Reader(pool)
    pool.close()


@pytest.fixture
def decoder_jobs(dying: Reader, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The jobs for which a decoder was started."""
    jobs: list[object] = []
    fork = dying.pool.forks.fork

    def note(message: bytes, descriptors: Sequence[int]) -> socket.socket:
        jobs.append(message)
        return fork(message, descriptors)

    monkeypatch.setattr(dying.pool.forks, "fork", note)
    return jobs


def decoders(pool: DecoderPool) -> list[int]:
    pid = pool.forks.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


def only_decoder(pool: DecoderPool) -> int:
    """Return the decoder at work, after the decoders of earlier tests have ended."""
    until = time.monotonic() + 60
    while len(pids := decoders(pool)) != 1 and time.monotonic() < until:
        time.sleep(0.01)
    [decoder] = pids
    return decoder


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"spin", "within its limits: 1 s of processor time"),
        (b"memory", "within its limits: 1024 MiB of memory"),
        (
            b"abort",
            "within its limits: its decoder ended by signal 6, with limits of 1024 MiB and 1 s",
        ),
        (b"crash", "within its limits: its decoder ended by signal 11"),
    ],
)
def test_a_file_that_ends_its_decoder_is_refused_and_remembered(
    dying: Reader, decoder_jobs: list[object], data: bytes, message: str
) -> None:
    for _ in range(100):
        with pytest.raises(InvalidMedia, match=message) as raised:
            dying.video(data, [0])
        assert raised.value.field == FIELD
    assert len(decoder_jobs) == 1
    dying.video(SEQUENCE, [0])


def test_a_refused_file_is_tried_again_after_some_time(
    dying: Reader, decoder_jobs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "REMEMBERED_S", 0.0)
    for _ in range(2):
        with pytest.raises(InvalidMedia, match="signal 6"):
            dying.video(b"abort:later", [0])
    assert len(decoder_jobs) == 2


def test_a_costly_use_of_a_file_is_refused_and_not_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "SPAWNER", "tests.renderer.decoding.dying")
    decoders = MediaDecoders(RendererConfig(), in_thread)

    def read(tenant: str, num_frames: int, indexes: tuple[int, ...]) -> int:
        sampling = FrameSampling(num_frames=num_frames)
        with decoders.open(VIDEO, b"costly", FIELD, tenant, sampling) as video:
            assert isinstance(video, DecodedVideo)
            return len(list(video.read(FramePlan(indexes, 8, 8, 1, 1.0))))

    try:
        for indexes in ((0, 1), (0,)):
            with pytest.raises(InvalidMedia, match="signal 6"):
                read("a", 2, indexes)
        assert read("b", 2, (0,)) == 1
        assert read("a", 1, (0,)) == 1
    finally:
        decoders.close()


def test_another_file_is_decoded_while_one_dies(dying: Reader) -> None:
    failed: list[BaseException] = []

    def spin() -> None:
        try:
            dying.video(b"spin:2", [0])
        except InvalidMedia as error:
            failed.append(error)

    thread = threading.Thread(target=spin)
    thread.start()
    for _ in range(5):
        _, frames = dying.video(SEQUENCE, range(20))
        assert len(frames) == 20
    thread.join()
    assert len(failed) == 1


def test_a_killed_decoder_is_replaced_where_it_was(dying: Reader) -> None:
    _, expected = dying.video(SEQUENCE, range(20))
    read = []
    with dying.pool.open("frames", SEQUENCE, "hash", FIELD) as decoding:
        for number, frame in enumerate(decoding.read_frames(range(20))):
            read.append(frame.copy())
            if number == 7:
                os.kill(only_decoder(dying.pool), signal.SIGKILL)
    np.testing.assert_array_equal(read, expected)
    # The file is not blamed.
    dying.video(SEQUENCE, [0])


def test_a_decoder_gives_way_to_its_renderer(dying: Reader) -> None:
    with dying.pool.open("frames", SEQUENCE, "hash", FIELD) as decoding:
        next(iter(decoding.read_frames(range(20))))
        decoder = only_decoder(dying.pool)
        assert os.getpriority(os.PRIO_PROCESS, decoder) > os.getpriority(os.PRIO_PROCESS, 0)


def test_a_killed_spawner_is_replaced(dying: Reader) -> None:
    _, expected = dying.video(SEQUENCE, range(20))
    read = []
    with dying.pool.open("frames", SEQUENCE, "hash", FIELD) as decoding:
        for number, frame in enumerate(decoding.read_frames(range(20))):
            read.append(frame.copy())
            if number == 7:
                assert dying.pool.forks.pid is not None
                os.kill(dying.pool.forks.pid, signal.SIGKILL)
    np.testing.assert_array_equal(read, expected)


def test_decoders_that_are_always_killed_are_no_fault_of_the_file(dying: Reader) -> None:
    with pytest.raises(WorkerFailure, match="3 processes that decoded the video were killed"):
        dying.video(b"killed", [0])


def test_the_replies_of_a_decoder_that_has_ended_are_received(
    dying: Reader, decoder_jobs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with dying.pool.open("samples", b"late", "hash", FIELD) as decoding:
        pieces = decoding.read_samples(8000)
        next(pieces)
        receive = decoding._receive

        def receive_later() -> object:
            while decoders(dying.pool):
                time.sleep(0.01)
            return receive()

        monkeypatch.setattr(decoding, "_receive", receive_later)
        assert list(pieces) == []
    assert len(decoder_jobs) == 1


def test_a_decoder_without_a_waiter_ends(dying: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    with dying.pool.open("frames", b"sleep", "hash", FIELD) as decoding:
        monkeypatch.setattr(decoding, "_receive", lambda: None)
        with pytest.raises(InvalidMedia):
            decoding.probe_video()
        while not decoders(dying.pool):
            time.sleep(0.01)
    while decoders(dying.pool):
        time.sleep(0.01)


@pytest.mark.parametrize("modality", [VIDEO, AUDIO])
def test_an_empty_file_needs_no_decoder(modality: Modality) -> None:
    media = MediaDecoders(RendererConfig(), in_thread)
    with (
        pytest.raises(InvalidMedia, match=f"the {modality}'s file is empty") as caught,
        media.open(modality, b"", FIELD),
    ):
        pass
    assert caught.value.field == FIELD
    assert media._tools.pool.forks.pid is None


def test_a_closed_pool_starts_nothing() -> None:
    pool = DecoderPool(LIMITS, 1)
    with pool.open("frames", SEQUENCE, "hash", FIELD) as decoding:
        decoding.probe_video()
        pool.close()
        with pytest.raises(WorkerFailure, match="could not be started"):
            list(decoding.read_frames(range(20)))
    assert not Path(f"/proc/{pool.forks.pid}").exists()


def test_a_decoder_opens_no_file(dying: Reader) -> None:
    """Not even a file that is readable by all users."""
    with pytest.raises(InvalidMedia, match="damaged or incomplete"):
        dying.video(b"open:/etc/passwd", [0])


def test_mp4_needs_the_extra_and_nothing_else_does() -> None:
    pool = DecoderPool(LIMITS, 1, "tests.renderer.decoding.hiding")
    reader = Reader(pool)
    try:
        for read in (lambda data: reader.video(data, [0]), reader.audio):
            with pytest.raises(UnsupportedContent, match=r"MP4 .* the extra pagemill\[video\]"):
                read(files.video())
        assert len(reader.video(SEQUENCE, [0, 1])[1]) == 2
        assert len(reader.audio(files.sound(files.noise(16_000), 16_000))[1]) == 16_000
    finally:
        pool.close()
