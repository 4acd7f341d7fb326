"""Formats of sound: 16-bit samples of one channel, alone or as a WAV file. Pure."""

import struct

WAV, PCM, PCM16 = "wav", "pcm", "pcm16"
MEDIA_TYPES = {WAV: "audio/wav", PCM: "audio/pcm"}
"""Media types of the formats of a speech."""

# The length is not known while the sound is generated. Players read to the end of the body.
_OPEN_LENGTH = 2**32 - 1
_HEADER_LEN = 44


def wav_header(sample_rate: int, num_bytes: int | None = None) -> bytes:
    """Return the header of a WAV file with `num_bytes` of samples; None for an open length."""
    file_len = _OPEN_LENGTH if num_bytes is None else _HEADER_LEN - 8 + num_bytes
    data_len = _OPEN_LENGTH if num_bytes is None else num_bytes
    sound = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    data = struct.pack("<4sI", b"data", data_len)
    return struct.pack("<4sI4s", b"RIFF", file_len, b"WAVE") + sound + data


def sound_len(sound_format: str, num_samples: int) -> int:
    """Return the number of bytes of a sound; without samples there is no header either."""
    header_len = _HEADER_LEN if sound_format == WAV and num_samples else 0
    return header_len + 2 * num_samples
