"""Media decoders: one function per modality, from a file's bytes to decoded media."""

import asyncio
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

from shared.config.schema import RendererConfig
from shared.models.frames import resize_frame
from shared.models.media import (
    AudioProbe,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    Frame,
    FramePlan,
    VideoProbe,
)
from shared.protocol.multimodal import (
    AUDIO,
    DEFAULT_SAMPLING,
    IMAGE,
    VIDEO,
    FrameSampling,
    Modality,
    content_hash,
)
from workers.renderer.decoding.decoding import Decoding
from workers.renderer.decoding.messages import DecodingLimits
from workers.renderer.decoding.pool import DecoderPool
from workers.renderer.media.image_decoder import check_num_bytes, decode_image
from workers.renderer.threads import InThread, Result

BATCH_NICENESS = 5
"""Niceness of the threads that decode media for the batch lane. Beside others that want the whole
processor they get a quarter of it: with much less, a large image would miss the ack wait."""


@dataclass(frozen=True, slots=True)
class MediaTools:
    config: RendererConfig
    pool: DecoderPool
    tenant: str = ""
    sampling: FrameSampling = DEFAULT_SAMPLING

    @property
    def use(self) -> Hashable:
        """What decides what is read of a file."""
        return self.tenant, self.sampling


MediaDecoder = Callable[[bytes, MediaTools, str], AbstractContextManager[DecodedMedia]]
"""Decodes one file, within limits; errors name the field that is the last argument.

A video or a sound is only probed at first; the layout's plan says what its `read` decodes, while
the context is open. Blocks. Raises a RequestError: MediaTooLarge, UnsupportedContent or
InvalidMedia.
"""

SEQUENCE_FPS = 1.0


@contextmanager
def decode_video(data: bytes, tools: MediaTools, field: str) -> Iterator[DecodedVideo]:
    """Probe a video. Raises UnsupportedContent, InvalidMedia or MediaTooLarge.

    A decoder process yields whole frames one at a time, in memory that it shares with the renderer.
    They are resized here, by the arithmetic that the model's family prescribes. Another process
    reads the sound, if that is wanted as well.
    """
    check_num_bytes(len(data), tools.config, field, VIDEO)
    source_hash = content_hash(data)
    with ExitStack() as opened:
        decoding = opened.enter_context(
            tools.pool.open("frames", data, source_hash, field, tools.use)
        )
        found = decoding.probe_video()
        fps = SEQUENCE_FPS if found.is_sequence else found.fps
        probe = VideoProbe(found.num_frames, fps, found.width, found.height, found.is_sequence)

        def read(plan: FramePlan) -> Iterator[Frame]:
            return (resize_frame(frame, plan) for frame in decoding.read_frames(plan.indexes))

        sound = None
        if tools.sampling.use_audio and found.has_sound:
            samples = tools.pool.join("samples", data, source_hash, field, tools.use)
            sound = probe_sound(opened.enter_context(samples), source_hash)
        yield DecodedVideo(probe, read, source_hash, sound)


@contextmanager
def decode_audio(data: bytes, tools: MediaTools, field: str) -> Iterator[DecodedAudio]:
    """Probe a sound. Raises UnsupportedContent, InvalidMedia or MediaTooLarge."""
    check_num_bytes(len(data), tools.config, field, AUDIO)
    source_hash = content_hash(data)
    with tools.pool.open("samples", data, source_hash, field, tools.use) as decoding:
        yield probe_sound(decoding, source_hash)


def probe_sound(decoding: Decoding, source_hash: str) -> DecodedAudio:
    """Raises what `decode_audio` raises."""
    found = decoding.probe_audio()
    probe = AudioProbe(found.num_samples / found.rate, found.rate, found.num_channels)
    return DecodedAudio(probe, lambda plan: decoding.read_samples(plan.rate), source_hash)


@contextmanager
def open_image(data: bytes, tools: MediaTools, field: str) -> Iterator[DecodedImage]:
    """Decode an image as `decode_image` does."""
    yield decode_image(data, tools.config, field)


DECODERS: Mapping[Modality, MediaDecoder] = {
    IMAGE: open_image,
    VIDEO: decode_video,
    AUDIO: decode_audio,
}


class MediaDecoders:
    """The decoders of a renderer, and the threads that wait for them.

    Videos and sounds have threads of their own, so that images do not wait behind them. So does the
    batch lane: Linux gives its threads the time that others leave, and lets no thread go back to a
    higher priority.
    """

    def __init__(self, config: RendererConfig, in_thread: InThread) -> None:
        self._in_thread = in_thread
        self._threads = ThreadPoolExecutor(config.decoders, "decode")
        self._batch_image_threads = _patient_threads(config.threads, "batch-image")
        self._batch_threads = _patient_threads(config.decoders, "batch-decode")
        self._tools = MediaTools(config, DecoderPool(_limits_of(config), config.decoders))

    def start(self) -> None:
        """Start the process that decoders of videos and sounds are forked from."""
        self._tools.pool.start()

    def close(self) -> None:
        for threads in (self._threads, self._batch_image_threads, self._batch_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._tools.pool.close()

    def open(
        self,
        modality: Modality,
        data: bytes,
        field: str,
        tenant: str = "",
        sampling: FrameSampling = DEFAULT_SAMPLING,
    ) -> AbstractContextManager[DecodedMedia]:
        """Decode one file. Blocks, and raises what a MediaDecoder raises.

        A file that a tenant's sampling has ended a decoder with is refused to this tenant and
        sampling alone.
        """
        tools = replace(self._tools, tenant=tenant, sampling=sampling)
        return DECODERS[modality](data, tools, field)

    async def run(
        self, modality: Modality, function: Callable[[], Result], lane: str = "interactive"
    ) -> Result:
        """Run a function that decodes media of this modality in a thread."""
        if modality == IMAGE and lane != "batch":
            return await self._in_thread(function)
        threads = self._threads
        if lane == "batch":
            threads = self._batch_image_threads if modality == IMAGE else self._batch_threads
        return await asyncio.get_running_loop().run_in_executor(threads, function)


def _patient_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads that run while others of higher priority do not need the time."""
    return ThreadPoolExecutor(number, name, os.nice, (BATCH_NICENESS,))


def _limits_of(config: RendererConfig) -> DecodingLimits:
    return DecodingLimits(
        config.max_video_frames,
        config.max_video_pixels,
        config.max_image_side,
        config.max_video_seconds,
        config.max_audio_seconds,
        config.decoder_cpu_s,
        config.decoder_memory_mib,
    )
