"""The renderer's part of the configuration."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from shared.config_stages import Positive
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, Modality

Seconds = Annotated[float, Meta(gt=0)]


class RendererConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on media files and on fetching them."""

    max_image_bytes: Positive = 32 * 2**20
    """Limit on the size of one image file."""
    max_image_pixels: Positive = 33_554_432
    """Limit on the pixels of one image."""
    max_image_side: Positive = 16_384
    """Limit on the width and the height of one image, in pixels."""
    max_video_bytes: Positive = 64 * 2**20
    """Limit on the size of one video file."""
    max_video_frames: Positive = 36_000
    """Limit on the frames in one video file, most of which are not decoded."""
    max_video_pixels: Positive = 8_847_360
    """Limit on the pixels of one frame of a video; by default those of 4096 x 2160."""
    max_video_seconds: Seconds = 3600.0
    """Limit on the duration of one video."""
    max_audio_bytes: Positive = 25 * 2**20
    """Limit on the size of one sound file."""
    max_audio_seconds: Seconds = 600.0
    """Limit on the duration of one sound."""
    media_hosts: list[str] = []
    """Hosts from which media may be fetched by URL; `*` matches any part of a name. None by
    default. Addresses outside the public internet are refused even so."""
    media_networks: list[str] = []
    """Private networks that are exempt from that refusal, such as `10.1.0.0/16`."""
    fetch_timeout_s: Seconds = 5.0
    """Time from the resolution of the name to the last byte of a fetched file."""
    url_cache_mib: Positive = 64
    """Size of the cache of fetched files by URL: that of images, and as much for videos and for
    sounds."""
    concurrency: Positive = 8
    """Limit on tasks in flight in one renderer."""
    threads: Positive = 2
    """Number of threads that decode and process images."""
    decoders: Positive = 2
    """Number of videos and sounds that are decoded at one time, each in a process of its own."""
    decoder_cpu_s: Positive = 30
    """Limit on the processor time that decoding one file may take, in whole seconds."""
    decoder_memory_mib: Annotated[int, Meta(ge=512)] = 1536
    """Limit on the address space of a process that decodes a file. 0.3 GiB of it are libraries."""

    @property
    def max_bytes(self) -> Mapping[Modality, int]:
        """Limit on the size of a file of each modality."""
        return {
            IMAGE: self.max_image_bytes,
            VIDEO: self.max_video_bytes,
            AUDIO: self.max_audio_bytes,
        }
