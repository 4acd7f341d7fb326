"""Sounds of containers: AAC, and the sound of MP4, MOV, WebM, Matroska and AVI, by PyAV."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from shared.decoding.refusal import Refusal
from workers.renderer.decoding import audio_file, packets
from workers.renderer.decoding.containers import Bytes, Container
from workers.renderer.decoding.messages import MEDIA, AudioProbe, DecodingLimits

# The frames of a video are not decoded; the limit keeps its stream from allocating a large frame.
MAX_PIXELS = 2**25


class PacketAudio:
    def __init__(self, data: Bytes, container: Container, limits: DecodingLimits) -> None:
        self._data = data
        self._container = container
        opened, stream = self._open()
        context = stream.codec_context
        audio_file.check_header(context.sample_rate, context.channels, 0, limits)
        num_samples = _count_samples(opened, stream, limits)
        self.probe = AudioProbe(
            context.sample_rate,
            context.channels,
            num_samples,
            f"{container.title}, {context.name}",
        )

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        opened, stream = self._open()
        waiting: list[NDArray[np.float32]] = []
        num_waiting = 0
        for frame in packets.decode_packets(opened.demux(stream)):
            samples = self._convert(frame)
            waiting.append(samples)
            num_waiting += len(samples)
            if num_waiting >= self.probe.rate:
                yield np.concatenate(waiting)
                waiting, num_waiting = [], 0
        if waiting:
            yield np.concatenate(waiting)

    def _open(self) -> tuple[InputContainer, AudioStream]:
        opened = packets.open_container(self._data, self._container, max_pixels=str(MAX_PIXELS))
        codecs = packets.AUDIO_CODECS
        return opened, packets.select_stream(
            opened, opened.streams.audio, codecs, MEDIA["samples"], MAX_PIXELS
        )

    def _convert(self, frame: AudioFrame) -> NDArray[np.float32]:
        """Return [samples, channels] of a frame, between -1 and 1."""
        num_channels = len(frame.layout.channels)
        if (frame.sample_rate, num_channels) != (self.probe.rate, self.probe.num_channels):
            raise Refusal("invalid", "the sound changes its rate or its channels")
        values: NDArray[Any] = frame.to_ndarray()  # [channels, samples], or all in one row
        samples = values.T if frame.format.is_planar else values.reshape(-1, num_channels)
        if samples.dtype == np.uint8:
            return (samples.astype(np.float32) - 128) / np.float32(128)
        if samples.dtype.kind == "i":
            return samples.astype(np.float32) / np.float32(2 ** (8 * samples.itemsize - 1))
        return samples.astype(np.float32)


def _count_samples(opened: InputContainer, stream: AudioStream, limits: DecodingLimits) -> int:
    """Return the number of samples, computed from the durations of the packets."""
    rate = stream.codec_context.sample_rate
    duration = 0
    for packet in opened.demux(stream):
        duration += packet.duration or 0
        audio_file.check_duration(float(duration * (stream.time_base or 0)), limits)
    return round(duration * (stream.time_base or 0) * rate)
