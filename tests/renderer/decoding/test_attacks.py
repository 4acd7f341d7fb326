"""Files that are meant to harm: each gets one error with number and limit, at little cost."""

import io
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from msgspec.structs import replace

from shared.decoding.refusal import Refusal
from shared.errors import InvalidMedia, MediaTooLarge, RequestError, UnsupportedContent
from tests.renderer.decoding import files
from tests.renderer.decoding.files import av
from tests.renderer.decoding.reading import FIELD, LIMITS, Reader
from workers.renderer.decoding import packet_video
from workers.renderer.decoding.containers import MATROSKA, MP4
from workers.renderer.decoding.packet_video import PacketVideo

MAX_CPU_S = 1.0
MAX_GROWTH_KIB = 64 * 2**10


def long_video() -> bytes:
    """Ten hours of two pictures, in less than a megabyte."""
    return files.repeated(files.video(num_frames=2), 36_000, Fraction(1))


def many_frames() -> bytes:
    return files.repeated(files.video(num_frames=2), 36_001, Fraction(1, 30))


def huge_frames() -> bytes:
    return mjpeg([np.zeros((4096, 2304, 3), np.uint8)] * 2)


def huge_first_frame() -> bytes:
    """FFmpeg would decode it while it opens the file."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=1, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 4096, 2304, "yuv420p"
        black = np.zeros((2304 * 3 // 2, 4096), np.uint8)
        output.mux(stream.encode(av.VideoFrame.from_ndarray(black, "yuv420p")))
        output.mux(stream.encode())
    return file.getvalue()


def wide_frames() -> bytes:
    return mjpeg([np.zeros((8, 16_392, 3), np.uint8)])


def changing_size() -> bytes:
    return mjpeg([files.picture(0, *size) for size in ((64, 48), (64, 48), (2048, 1024))])


def mjpeg(pictures: list[np.ndarray]) -> bytes:
    """Return JPEG files as a video. Its header has the size of the first."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as output:
        stream = output.add_stream("mjpeg", rate=1)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuvj420p"
        for number, picture in enumerate(pictures):
            packet = av.Packet(files.jpeg(picture))
            packet.stream, packet.time_base = stream, Fraction(1)
            packet.pts = packet.dts = number
            packet.duration, packet.is_keyframe = 1, True
            output.mux(packet)
    return file.getvalue()


def strange_codec(codec: str = "ffv1", container: str = "matroska") -> bytes:
    return files.video(codec, container)


def only_sound() -> bytes:
    return files.packed_sound("aac", "mp4", files.noise(8000), 8000)


def animation(size: int, num_frames: int) -> bytes:
    """Return a GIF with frames of one pixel each on a large screen."""
    screen = b"GIF89a" + struct.pack("<HHBBB", size, size, 0x80, 0, 0) + bytes(6)
    frame = b"!\xf9\x04\0\x0a\0\0\0" + b",\0\0\0\0\1\0\1\0\0" + b"\x02\x02D\x01\0"
    return screen + frame * num_frames + b";"


VIDEOS: dict[str, tuple[Callable[[], bytes], type[RequestError], str]] = {
    "ten hours": (long_video, MediaTooLarge, r"of 36000 s is over the limit of 3600 s"),
    "many frames": (many_frames, MediaTooLarge, r"more than the limit of 36000 frames"),
    "huge frames": (huge_frames, MediaTooLarge, "2304 x 4096 = 9437184 pixels .* 8388608"),
    "huge first frame": (huge_first_frame, MediaTooLarge, "4096 x 2304 = 9437184 pixels"),
    "wide frames": (wide_frames, MediaTooLarge, r"16392 x 8 is over the limit of 16384"),
    "changing size": (changing_size, InvalidMedia, r"changes its size from 64 x 48 to 2048"),
    "strange codec": (strange_codec, UnsupportedContent, r"codec ffv1 is not accepted"),
    "strange container": (
        lambda: strange_codec("mpeg2video", "mpegts"),
        InvalidMedia,
        "not a readable video",
    ),
    "only a sound": (only_sound, InvalidMedia, "the file has no video"),
    "playlist": (
        lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n",
        InvalidMedia,
        "not a readable video",
    ),
    "list of files": (
        lambda: b"ffconcat version 1.0\nfile /etc/passwd\n",
        InvalidMedia,
        "not a readable video",
    ),
    "nothing": (lambda: b"", InvalidMedia, "damaged or incomplete"),
    "half": (lambda: files.video()[:700], InvalidMedia, "damaged"),
    "large animation": (lambda: animation(16_000, 2), MediaTooLarge, "256000000 pixels"),
    "long animation": (lambda: animation(16, 36_001), MediaTooLarge, "36000 frames"),
    "costly animation": (
        lambda: animation(2048, 129),
        MediaTooLarge,
        "541065216 pixels .* 536870912",
    ),
    "sequence of sizes": (
        lambda: files.sequence([files.jpeg(files.picture(0, 8, s)) for s in (8, 16, 8)]),
        InvalidMedia,
        r"frame 1 of the video is 8 x 16, and the first one 8 x 8",
    ),
    "sequence of others": (
        lambda: files.sequence([files.jpeg(files.picture(0)), b"BM", b""]),
        InvalidMedia,
        "frame 1 of the video is not a JPEG",
    ),
    "huge sequence": (
        lambda: files.sequence([files.jpeg(np.zeros((4096, 2304, 3), np.uint8))]),
        MediaTooLarge,
        "9437184 pixels",
    ),
}


def forged_wav(**header: int) -> bytes:
    """Return a WAV file of one second with a header that claims another length."""
    data = bytearray(files.sound(files.noise(16_000, 1), 16_000, subtype="PCM_16"))
    for name, (offset, form) in {"channels": (22, "<H"), "rate": (24, "<I")}.items():
        if name in header:
            struct.pack_into(form, data, offset, header[name])
    if "num_bytes" in header:
        struct.pack_into("<I", data, data.find(b"data") + 4, header["num_bytes"])
    return bytes(data)


def silence(rate: int, seconds: int, channels: int = 1, **options: str) -> bytes:
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, channels, **options) as output:
        for _ in range(seconds):
            output.write(np.zeros((rate, channels), np.int16))
    return file.getvalue()


def not_numbers() -> bytes:
    samples = files.noise(16_000, 1)
    samples[8_000] = np.nan
    return files.sound(samples, 16_000)


SOUNDS: dict[str, tuple[Callable[[], bytes], type[RequestError], str]] = {
    "silence in FLAC": (
        lambda: silence(8000, 31, 8, format="FLAC"),
        MediaTooLarge,
        "31 s is over the limit of 30 s",
    ),
    "silence in FLAC without a length": (
        lambda: files.without_length(silence(8000, 31, 8, format="FLAC")),
        MediaTooLarge,
        "s is over the limit of 30 s",
    ),
    "silence in Opus": (
        lambda: silence(8000, 32, format="OGG", subtype="OPUS"),
        MediaTooLarge,
        "s is over the limit of 30 s",
    ),
    "forged rate": (lambda: forged_wav(rate=655_350), MediaTooLarge, "655350 .* 192000"),
    "slow rate": (lambda: forged_wav(rate=1), InvalidMedia, "of 1 samples a second.* 4000"),
    "64 channels": (
        lambda: files.sound(files.noise(1600, 64), 16_000),
        MediaTooLarge,
        "64 channels is over the limit of 8",
    ),
    "no numbers": (not_numbers, InvalidMedia, "are not finite"),
    "too loud": (
        lambda: files.sound(np.full((100, 1), 1e30, np.float32), 16_000),
        InvalidMedia,
        "far too loud",
    ),
    "strange subtype": (
        lambda: files.sound(files.noise(1600, 1), 16_000, subtype="MS_ADPCM"),
        UnsupportedContent,
        "MS_ADPCM is not accepted",
    ),
    "strange format": (
        lambda: files.sound(files.noise(1600, 1), 16_000, format="AIFF"),
        InvalidMedia,
        "not a readable sound",
    ),
    "only a video": (files.video, InvalidMedia, "the file has no sound"),
    "half": (
        lambda: silence(16_000, 1, format="FLAC")[:60],
        InvalidMedia,
        "damaged or incomplete",
    ),
}


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def children_cpu_s(pid: int) -> float:
    """Return the processor time of all decoders that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / 100


@pytest.fixture
def cheap(reader: Reader) -> Iterator[None]:
    """Check that what a test does costs little memory here, and little time in decoders."""
    reader.video(files.video(), [0])
    pid = reader.pool.forks.pid
    assert pid is not None
    before = children_cpu_s(pid)
    yield
    reader.video(files.video(), [0])  # Its decoder ends after the decoder of the test.
    assert children_cpu_s(pid) - before < MAX_CPU_S


@pytest.mark.parametrize("name", VIDEOS)
def test_a_hostile_video_gets_one_error(reader: Reader, cheap: None, name: str) -> None:
    make, error, message = VIDEOS[name]
    data = make()
    assert len(data) < 4 * 2**20
    before_kib = peak_kib()
    with pytest.raises(error, match=message) as raised:
        reader.video(data, [0, 1, 2])
    assert raised.value.field == FIELD
    assert peak_kib() - before_kib < MAX_GROWTH_KIB


@pytest.mark.parametrize("name", SOUNDS)
def test_a_hostile_sound_gets_one_error(reader: Reader, cheap: None, name: str) -> None:
    make, error, message = SOUNDS[name]
    data = make()
    assert len(data) < 4 * 2**20
    before_kib = peak_kib()
    with pytest.raises(error, match=message) as raised:
        reader.audio(data)
    assert raised.value.field == FIELD
    assert peak_kib() - before_kib < MAX_GROWTH_KIB


def test_samples_are_counted_and_not_believed(reader: Reader, cheap: None) -> None:
    _, read = reader.audio(forged_wav(num_bytes=2**31 - 1))
    assert len(read) == 16_000


def test_other_streams_are_not_decoded(reader: Reader, cheap: None) -> None:
    """The second video of a file is not read, so its codec does not matter."""
    file = io.BytesIO()
    sources = [av.open(io.BytesIO(data)) for data in (files.video(), strange_codec())]
    with av.open(file, "w", format="matroska") as output:
        targets = [output.add_stream_from_template(source.streams.video[0]) for source in sources]
        for source, target in zip(sources, targets, strict=True):
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = target
                    output.mux(packet)
            source.close()
    probe, frames = reader.video(file.getvalue(), [0, 47])
    assert probe.num_frames == 48
    assert len(frames) == 2


def test_few_key_frames_cost_little(reader: Reader, cheap: None) -> None:
    data = files.repeated(files.video(num_frames=2), 3_000, Fraction(1, 30))
    probe, frames = reader.video(data, range(0, 3_000, 100))
    assert (probe.num_frames, len(frames)) == (3_000, 30)


@pytest.mark.parametrize("make", [files.video, lambda: files.video("libvpx-vp9", "webm")])
def test_flipped_bytes_end_no_decoder(
    reader: Reader, cheap: None, make: Callable[[], bytes]
) -> None:
    """Frames come of the size that was announced, or one error; a dead decoder would be another."""
    outcomes = []
    for seed in range(20):
        data = bytearray(make())
        rng = np.random.default_rng(seed)
        for position in rng.integers(200, len(data), 20):
            data[position] ^= int(rng.integers(1, 255))
        try:
            probe, frames = reader.video(bytes(data), [0, 20, 47])
        except RequestError as error:
            outcomes.append(error.message)
        else:
            # A byte of the header may have been the size.
            assert {frame.shape for frame in frames} == {(probe.height, probe.width, 3)}
    assert not [message for message in outcomes if "signal" in message or "time" in message]


@pytest.mark.parametrize("make", [long_video, many_frames])
def test_the_table_of_an_mp4_is_checked_before_its_packets(
    make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_packets(*_: object) -> None:
        raise AssertionError("packets were read")

    monkeypatch.setattr(packet_video, "_note_packets", read_packets)
    with pytest.raises(Refusal, match="limit"):
        PacketVideo(make(), MP4, LIMITS)


def test_packets_are_read_up_to_the_limit_on_the_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    data = files.repeated(files.video(num_frames=2), 1_000, Fraction(100), "matroska")
    noted = []
    note = packet_video._note_packets

    def noting(*args: Any) -> Any:
        noted.append(note(*args))
        return noted[-1]

    monkeypatch.setattr(packet_video, "_note_packets", noting)
    with pytest.raises(Refusal, match="over the limit of 3600 s"):
        PacketVideo(data, MATROSKA, LIMITS)
    assert noted[0].num_frames == 38


def test_frames_that_an_edit_list_hides_are_not_counted() -> None:
    """Cameras shorten a video in this way, and leave the frames in the file."""
    file = io.BytesIO()
    options = {"avoid_negative_ts": "disabled"}
    with (
        av.open(io.BytesIO(files.video("mpeg4", "mov", gop=48))) as template,
        av.open(file, "w", format="mov", options=options) as output,
    ):
        target = output.add_stream_from_template(template.streams.video[0])
        for packet in template.demux(video=0):
            if packet.size:
                packet.stream = target
                packet.pts -= 40 * packet.duration
                packet.dts -= 40 * packet.duration
                output.mux(packet)
    limits = replace(LIMITS, max_frames=8)
    assert PacketVideo(file.getvalue(), MP4, limits).probe.num_frames == 8
    with pytest.raises(Refusal, match="limit of 7 frames"):
        PacketVideo(file.getvalue(), MP4, replace(LIMITS, max_frames=7))
