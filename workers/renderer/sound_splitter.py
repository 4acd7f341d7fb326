"""Sound splitter: cuts a stored recording into pieces that a model can process at once.

The pieces are stored as separate files. Their names depend only on the recording, so the request
for each piece can be repeated independently.
"""

import io

import numpy as np
import soundfile

from shared.bus.bus import Bus
from shared.config.schema import RendererConfig
from shared.errors import UnsupportedContent
from shared.models.media import DecodedAudio, SamplePlan
from shared.models.mel_layout import SAMPLE_RATE
from shared.protocol.multimodal import AUDIO
from shared.state import media_store
from shared.state.media_store import read_stored
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.media.splitter import MAX_PIECE_S, Samples, split_sound
from workers.renderer.processing.processor import Processor

FIELD = "url"


class SoundSplitter:
    """Splits stored recordings, and stores the pieces."""

    def __init__(self, bus: Bus, decoders: MediaDecoders, config: RendererConfig) -> None:
        self._bus = bus
        self._decoders = decoders
        self._config = config

    async def split(self, processor: Processor, url: str, tenant: str) -> list[str]:
        """Return the URLs of the pieces. Raises a RequestError, or Unavailable."""
        if not processor.accepts(AUDIO):
            raise UnsupportedContent("this model does not accept audio", field=FIELD)
        limit = self._config.max_bytes[AUDIO]
        data = await read_stored(self._bus, url, FIELD, limit, tenant)
        window_s = processor.window_s(AUDIO)
        pieces = await self._decoders.run(AUDIO, lambda: self._cut(data, window_s, tenant))
        if len(pieces) <= 1:
            return [url]
        urls = []
        for piece in pieces:
            name = await media_store.hash_media(piece)
            await media_store.store(self._bus, name, piece, tenant)
            urls.append(media_store.media_url(name))
        return urls

    def _cut(self, data: bytes, window_s: float, tenant: str) -> list[bytes]:
        """Return the pieces as files; none for a recording that need not be cut."""
        with self._decoders.open(AUDIO, data, FIELD, tenant) as media:
            assert isinstance(media, DecodedAudio)
            if media.probe.seconds <= min(window_s, MAX_PIECE_S):
                return []
            samples = media.read(SamplePlan(SAMPLE_RATE, num_tokens=0))
            return [_to_flac(piece) for piece in split_sound(samples, window_s)]


def _to_flac(samples: Samples) -> bytes:
    file = io.BytesIO()
    # A sample over full scale would wrap around.
    soundfile.write(file, np.clip(samples, -1.0, 1.0), SAMPLE_RATE, "PCM_16", format="FLAC")
    return file.getvalue()
