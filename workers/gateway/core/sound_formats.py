"""Formats of sound: 16-bit samples of one channel, alone or as a WAV file. Pure."""

import struct

WAV = "wav"

# The length is not known while the sound is made. Players read to the end of the body.
_OPEN_LENGTH = 2**32 - 1
_HEAD_LEN = 36


def wav_header(sample_rate: int, num_bytes: int | None = None) -> bytes:
    """Return the beginning of a WAV file with `num_bytes` of samples, or of any length."""
    file_len = _OPEN_LENGTH if num_bytes is None else _HEAD_LEN + num_bytes
    data_len = _OPEN_LENGTH if num_bytes is None else num_bytes
    sound = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    data = struct.pack("<4sI", b"data", data_len)
    return struct.pack("<4sI4s", b"RIFF", file_len, b"WAVE") + sound + data
