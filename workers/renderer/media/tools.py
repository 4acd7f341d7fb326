"""Settings and decoder pool that media decoders share."""

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
        """Everything that determines which parts of a file are read."""
        return self.tenant, self.sampling
