"""Reads files with a pool of decoders, for tests."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.protocol.multimodal import content_hash
from workers.renderer.decoding.messages import AudioProbe, DecodingLimits, VideoProbe
from workers.renderer.decoding.pool import DecoderPool

LIMITS = DecodingLimits(
    max_frames=36_000,
    max_pixels=2**23,
    max_side=16_384,
    max_video_s=3600.0,
    max_audio_s=30.0,
    max_page_pixels=2**25,
    max_cpu_s=10,
    max_memory_mib=1536,
)
FIELD = "messages[0].content[0].video_url.url"


class Reader:
    def __init__(self, pool: DecoderPool) -> None:
        self.pool = pool

    def video(
        self, data: bytes, indexes: Sequence[int]
    ) -> tuple[VideoProbe, list[NDArray[np.uint8]]]:
        with self.pool.open("frames", data, content_hash(data), FIELD) as decoding:
            probe = decoding.probe_video()
            return probe, [frame.copy() for frame in decoding.read_frames(indexes)]

    def audio(self, data: bytes, rate: int = 16_000) -> tuple[AudioProbe, NDArray[np.float32]]:
        with self.pool.open("samples", data, content_hash(data), FIELD) as decoding:
            probe = decoding.probe_audio()
            pieces = list(decoding.read_samples(rate))
            return probe, np.concatenate([np.zeros(0, np.float32), *pieces])

    def pages(
        self, data: bytes, numbers: list[int], dpi: int = 72
    ) -> tuple[int, list[NDArray[np.uint8]]]:
        """Return the number of pages, and the images of some of them."""
        with self.pool.open("pages", data, content_hash(data), FIELD, tuple(numbers)) as decoding:
            num_pages = decoding.probe_document().num_pages
            return num_pages, [image.copy() for image in decoding.read_pages(numbers, dpi)]

    def texts(self, data: bytes, numbers: list[int]) -> list[str]:
        with self.pool.open("pages", data, content_hash(data), FIELD) as decoding:
            return list(decoding.read_texts(numbers))
