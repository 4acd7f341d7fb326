"""Media decoders: one function per modality, from a file's bytes to decoded media."""

from collections.abc import Mapping
from typing import Protocol

from shared.config import RendererConfig
from shared.models.media import DecodedMedia
from shared.protocol.multimodal import IMAGE, Modality
from workers.renderer.media.image_decoder import decode_image


class MediaDecoder(Protocol):
    def __call__(self, data: bytes, limits: RendererConfig, field: str) -> DecodedMedia:
        """Decode one file.

        The decoder of a modality with frames or samples also chooses those that it keeps, because
        the others need not be decoded. Blocks. Raises MediaTooLarge or InvalidMedia, which name
        `field`.
        """
        ...


DECODERS: Mapping[Modality, MediaDecoder] = {IMAGE: decode_image}
