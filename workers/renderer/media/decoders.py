"""Media decoders: one function per kind of file, from its bytes to decoded media."""

import asyncio
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

from PIL import Image

from shared.config.schema import RendererConfig
from shared.decoding.image_reader import check_num_bytes
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
    DOCUMENT,
    IMAGE,
    VIDEO,
    FileKind,
    FrameSampling,
    content_hash,
)
from workers.renderer.decoding.decoding import Decoding
from workers.renderer.decoding.messages import DecodingLimits
from workers.renderer.decoding.pool import DecoderPool
from workers.renderer.media.image_decoder import decode_image
from workers.renderer.threads import InThread, Result

BATCH_NICENESS = 5
"""Niceness of the threads that decode media for the batch lane. On a busy processor they get a
quarter of the time: with much less, a large image would miss the ack wait."""


@dataclass(frozen=True, slots=True)
class MediaTools:
    """Settings and decoder pool that media decoders share."""

    config: RendererConfig
    pool: DecoderPool
    tenant: str = ""
    sampling: FrameSampling = DEFAULT_SAMPLING

    @property
    def use(self) -> Hashable:
        """Everything that determines which parts of a file are read."""
        return self.tenant, self.sampling


MediaDecoder = Callable[[bytes, MediaTools, str], AbstractContextManager[DecodedMedia]]
"""Function that decodes one file within limits. Errors name the field in the last argument.

A video or a sound is only probed at first. Its `read` decodes the parts in the layout's plan, while
the context is open. Blocks. Raises a RequestError: MediaTooLarge, UnsupportedContent or
InvalidMedia.
"""

SEQUENCE_FPS = 1.0


@contextmanager
def decode_video(data: bytes, tools: MediaTools, field: str) -> Iterator[DecodedVideo]:
    """Probe a video. Raises UnsupportedContent, InvalidMedia or MediaTooLarge.

    A decoder process yields whole frames one at a time, in memory that it shares with the renderer.
    They are resized here, with the arithmetic of the model's family. Another process reads the
    sound, if the request uses it.
    """
    check_num_bytes(len(data), tools.config, field, VIDEO)
    source_hash = content_hash(data)
    with ExitStack() as opened:
        decoding = opened.enter_context(
            tools.pool.open("frames", data, source_hash, field, tools.use)
        )
        file = decoding.probe_video()
        fps = SEQUENCE_FPS if file.is_sequence else file.fps
        probe = VideoProbe(file.num_frames, fps, file.width, file.height, file.is_sequence)

        def read(plan: FramePlan) -> Iterator[Frame]:
            return (resize_frame(frame, plan) for frame in decoding.read_frames(plan.indexes))

        sound = None
        if tools.sampling.use_audio and file.has_sound:
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
    """Return the sound of an open decoder. Raises the errors of `decode_audio`."""
    header = decoding.probe_audio()
    probe = AudioProbe(header.num_samples / header.rate, header.rate, header.num_channels)
    return DecodedAudio(probe, lambda plan: decoding.read_samples(plan.rate), source_hash)


@contextmanager
def open_image(data: bytes, tools: MediaTools, field: str) -> Iterator[DecodedImage]:
    """Decode an image as `decode_image` does."""
    yield decode_image(data, tools.config, field)


@contextmanager
def decode_page(data: bytes, tools: MediaTools, field: str) -> Iterator[DecodedImage]:
    """Decode a page of a document to an image. Raises InvalidMedia or MediaTooLarge."""
    page = tools.sampling.page
    assert page is not None
    source_hash = content_hash(data)
    with tools.pool.open("pages", data, source_hash, field, tools.use) as decoding:
        (pixels,) = decoding.read_pages([page.number], page.dpi)
        yield DecodedImage(Image.fromarray(pixels), source_hash)


DECODERS: Mapping[FileKind, MediaDecoder] = {
    IMAGE: open_image,
    VIDEO: decode_video,
    AUDIO: decode_audio,
    DOCUMENT: decode_page,
}


class MediaDecoders:
    """Decoders of a renderer, and the threads that wait for them.

    Videos, sounds and documents have separate threads, so that images do not wait for them. The
    batch lane has separate threads with a lower priority, because Linux does not allow a thread to
    return to a higher priority.
    """

    def __init__(self, config: RendererConfig, in_thread: InThread) -> None:
        self._in_thread = in_thread
        self._threads = ThreadPoolExecutor(config.decoders, "decode")
        self._batch_image_threads = _patient_threads(config.threads, "batch-image")
        self._batch_threads = _patient_threads(config.decoders, "batch-decode")
        self._tools = MediaTools(config, DecoderPool(_limits_of(config), config.decoders))

    def start(self) -> None:
        """Start the process that forks the decoders of videos, sounds and documents."""
        self._tools.pool.start()

    def close(self) -> None:
        for threads in (self._threads, self._batch_image_threads, self._batch_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._tools.pool.close()

    def open(
        self,
        kind: FileKind,
        data: bytes,
        field: str,
        tenant: str = "",
        sampling: FrameSampling = DEFAULT_SAMPLING,
    ) -> AbstractContextManager[DecodedMedia]:
        """Decode one file. Blocks, and raises the errors of a MediaDecoder.

        If a file exceeds its limits with a tenant's sampling, it is refused only for this tenant
        and this sampling.
        """
        tools = replace(self._tools, tenant=tenant, sampling=sampling)
        return DECODERS[kind](data, tools, field)

    @contextmanager
    def open_document(
        self, data: bytes, field: str, tenant: str, use: Hashable
    ) -> Iterator[Decoding]:
        """Open a document to count its pages and read their text. `use` is as for the pool."""
        check_num_bytes(len(data), self._tools.config, field, DOCUMENT)
        source_hash = content_hash(data)
        with self._tools.pool.open("pages", data, source_hash, field, (tenant, use)) as decoding:
            yield decoding

    async def run(
        self, kind: FileKind, function: Callable[[], Result], lane: str = "interactive"
    ) -> Result:
        """Run a function that decodes files of this kind, in a thread."""
        if kind == IMAGE and lane != "batch":
            return await self._in_thread(function)
        threads = self._threads
        if lane == "batch":
            threads = self._batch_image_threads if kind == IMAGE else self._batch_threads
        return await asyncio.get_running_loop().run_in_executor(threads, function)


def _patient_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads with a lower priority."""
    return ThreadPoolExecutor(number, name, os.nice, (BATCH_NICENESS,))


def _limits_of(config: RendererConfig) -> DecodingLimits:
    return DecodingLimits(
        config.max_video_frames,
        config.max_video_pixels,
        config.max_image_side,
        config.max_video_seconds,
        config.max_audio_seconds,
        config.max_image_pixels,
        config.decoder_cpu_s,
        config.decoder_memory_mib,
    )
