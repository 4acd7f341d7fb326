"""Audio decoder: from a file's bytes to samples of one channel."""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.models.media import AudioProbe, DecodedAudio
from shared.protocol.multimodal import AUDIO, content_hash
from workers.renderer.decoding.decoding import Decoding
from workers.renderer.media.image_decoder import check_num_bytes
from workers.renderer.media.tools import MediaTools


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
