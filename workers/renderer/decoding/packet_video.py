"""Videos of containers and codecs: MP4, MOV, WebM, Matroska and AVI, by PyAV.

Packets are counted and their times recorded without decoding. A FrameCursor then decodes the wanted
frames.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from shared.decoding.refusal import Refusal
from workers.renderer.decoding import containers, packets, video_file
from workers.renderer.decoding.containers import Bytes, Container
from workers.renderer.decoding.frame_cursor import FrameCursor
from workers.renderer.decoding.messages import MEDIA, DecodingLimits, VideoProbe
from workers.renderer.decoding.video_file import Pixels

MAX_MISSING = 0.05
"""Share of the wanted frames that may be damaged."""


@dataclass(frozen=True, slots=True)
class _Packets:
    """Times of a stream's packets."""

    num_frames: int
    times: list[int]
    """Times of all frames in display order; empty if some frames have no time."""
    keys: list[int]
    """Times of the key frames, ascending."""


class PacketVideo:
    def __init__(self, data: Bytes, container: Container, limits: DecodingLimits) -> None:
        self._data = data
        self._container = container
        self._limits = limits
        opened, stream = self._open()
        context = stream.codec_context
        self._coded = context.width, context.height
        if not any(self._coded):
            self._coded = self._size_in_header()
        video_file.check_size(*self._coded, limits)
        if container is containers.MP4 and len(stream.index_entries):
            _check(_read_table(stream, limits), stream, limits)
        self._packets = _note_packets(opened, stream, container, limits)
        _check(self._packets, stream, limits)
        self._turns = self._read_turns()
        fps = stream.average_rate
        width, height = self._coded[:: -1 if self._turns % 2 else 1]
        self.probe = VideoProbe(
            width,
            height,
            self._packets.num_frames,
            float(fps) if fps else None,
            f"{container.title}, {context.name}",
            has_sound=bool(opened.streams.audio),
        )

    def frames(self, indexes: Sequence[int]) -> Iterator[Pixels]:
        num_missing, num_allowed = 0, int(MAX_MISSING * len(indexes))
        select = self._select_by_time if self._packets.times else self._select_by_count
        for frame, is_exact in select(indexes):
            num_missing += not is_exact
            if frame is None or num_missing > num_allowed:
                raise Refusal("invalid", video_file.DAMAGED)
            yield self._convert(frame)

    def _open(self) -> tuple[InputContainer, VideoStream]:
        max_pixels = self._limits.max_pixels
        opened = packets.open_container(self._data, self._container, max_pixels=str(max_pixels))
        codecs = packets.VIDEO_CODECS
        return opened, packets.select_stream(
            opened, opened.streams.video, codecs, MEDIA["frames"], max_pixels
        )

    def _size_in_header(self) -> tuple[int, int]:
        """Return a size over `max_pixels`, which FFmpeg ignores in a normal open."""
        opened = packets.open_container(self._data, self._container, skip_frame="all")
        context = opened.streams.video[0].codec_context
        return context.width, context.height

    def _read_turns(self) -> int:
        """Return the number of quarter turns, counterclockwise, that make the frames upright."""
        opened, stream = self._open()
        frames: Iterator[VideoFrame] = packets.decode_packets(opened.demux(stream))
        for frame in frames:
            return round(frame.rotation / 90) % 4
        raise Refusal("invalid", video_file.DAMAGED)

    def _select_by_count(self, indexes: Sequence[int]) -> Iterator[tuple[VideoFrame | None, bool]]:
        """Decode all frames up to the last index, and yield the frames at `indexes`.

        A frame that cannot be decoded shifts the later frames, so that the last ones are missing.
        """
        opened, stream = self._open()
        waiting = list(reversed(indexes))
        frame = None
        num = 0
        for frame in packets.decode_packets(opened.demux(stream)):
            if num == waiting[-1]:
                waiting.pop()
                yield frame, True
            num += 1
            if not waiting:
                return
        is_enough = self._packets.num_frames - num <= MAX_MISSING * self._packets.num_frames
        for _ in waiting:
            yield frame, is_enough

    def _select_by_time(self, indexes: Sequence[int]) -> Iterator[tuple[VideoFrame | None, bool]]:
        """Yield each frame, or else the next frame that can be decoded; None if there is none."""
        times = [self._packets.times[index] for index in indexes]
        cursor = FrameCursor(*self._open(), self._packets.keys, frozenset(times))
        is_fast = True
        for time in times:
            frame = cursor.find(time)
            if is_fast and (frame is None or frame.pts != time):
                # The file is damaged, or the container's index of key frames is wrong.
                is_fast = False
                cursor = FrameCursor(*self._open(), [], None)
                frame = cursor.find(time)
            yield frame, frame is not None and frame.pts == time

    def _convert(self, frame: VideoFrame) -> Pixels:
        size = frame.width, frame.height
        if size != self._coded:
            raise Refusal(
                "invalid",
                f"the video changes its size from {self._coded[0]} x {self._coded[1]} to"
                f" {size[0]} x {size[1]}",
            )
        return np.rot90(frame.to_ndarray(format="rgb24", threads=1), self._turns)


def _read_table(stream: VideoStream, limits: DecodingLimits) -> _Packets:
    """Return the packets from an MP4's index, which FFmpeg uses to find them, without key frames.

    Reading the index takes a tenth of the time of reading the packets.
    """
    timestamps = (entry.timestamp for entry in stream.index_entries if not entry.is_discard)
    times = list(itertools.islice(timestamps, limits.max_frames + 1))
    return _Packets(len(times), times, [])


def _note_packets(
    opened: InputContainer, stream: VideoStream, container: Container, limits: DecodingLimits
) -> _Packets:
    times: list[int] = []
    keys: list[int] = []
    num_frames = 0
    max_span = limits.max_video_s / (stream.time_base or 1)
    for packet in opened.demux(stream):
        # The last packet is empty. Packets are discarded if an edit list hides their frames.
        if packet.size == 0 or packet.is_discard:
            continue
        num_frames += 1
        if num_frames > limits.max_frames:
            break
        if packet.pts is not None:
            times.append(packet.pts)
            if packet.pts - times[0] > max_span:
                break
            if packet.is_keyframe:
                keys.append(packet.pts)
    # AVI has frames in decoding order, and no times. Without frames that refer to later frames,
    # this is also the display order.
    is_reordered = container is containers.AVI and bool(stream.codec_context.has_b_frames)
    if is_reordered or len(set(times)) < num_frames:
        return _Packets(num_frames, [], [])
    return _Packets(num_frames, sorted(times), sorted(keys))


def _check(packets: _Packets, stream: VideoStream, limits: DecodingLimits) -> None:
    """Check the number of frames, and the duration by this number and by the times of frames."""
    fps, time_base = stream.average_rate, stream.time_base
    video_file.check_count(packets.num_frames, limits)
    counted = packets.num_frames / fps if fps else Fraction(0)
    span = Fraction(0)
    if packets.times and time_base:
        span = (packets.times[-1] - packets.times[0]) * time_base
    video_file.check_duration(float(max(counted, span)), limits)
