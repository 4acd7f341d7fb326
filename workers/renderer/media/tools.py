"""What decoders of media work with."""

from collections.abc import Hashable
from dataclasses import dataclass

from shared.config.schema import RendererConfig
from shared.protocol.multimodal import DEFAULT_SAMPLING, FrameSampling
from workers.renderer.decoding.pool import DecoderPool


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
