"""Media decoders: one function per modality, from a file's bytes to decoded media."""

from collections.abc import Callable, Mapping

from shared.config import RendererConfig
from shared.models.media import DecodedMedia
from shared.protocol.multimodal import IMAGE, Modality
from workers.renderer.media.image_decoder import decode_image

MediaDecoder = Callable[[bytes, RendererConfig, str], DecodedMedia]
"""Decodes one file, within limits; errors name the field that is the last argument.

The decoder of a modality with frames or samples also chooses those that it keeps, because the
others need not be decoded. Blocks. Raises MediaTooLarge or InvalidMedia.
"""

DECODERS: Mapping[Modality, MediaDecoder] = {IMAGE: decode_image}
