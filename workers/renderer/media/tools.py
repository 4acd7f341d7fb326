"""What decoders of media work with."""

from collections.abc import Hashable
from dataclasses import dataclass

from shared.config_renderer import RendererConfig
from workers.renderer.decoding.pool import DecoderPool


@dataclass(frozen=True, slots=True)
class MediaTools:
    config: RendererConfig
    pool: DecoderPool
    use: Hashable = ()
    """What decides what is read of a file: tenant and sampling."""
