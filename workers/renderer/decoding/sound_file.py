"""Sounds in WAV, FLAC, OGG and MP3, by libsndfile."""

import os
import struct
from collections.abc import Iterator

import numpy as np
import soundfile
from numpy.typing import NDArray

from shared.decoding.refusal import Refusal
from workers.renderer.decoding import audio_file
from workers.renderer.decoding.containers import Bytes, MemoryFile
from workers.renderer.decoding.messages import AudioProbe, DecodingLimits

FORMATS = frozenset({"WAV", "WAVEX", "FLAC", "OGG", "MP3"})
# libsndfile's number of samples for a header without one, as in FLAC that is streamed.
NO_LEN = 2**63 - 1
UNKNOWN = b"\xff" * 4
"""Length of a chunk of WAV that ends with the file."""
MAX_CHUNKS = 64
"""Limit on the chunks before the samples of a WAV."""
SUBTYPES = frozenset(
    {
        "PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE",
        "ULAW", "ALAW", "VORBIS", "OPUS", "MPEG_LAYER_III",
    }
)  # fmt: skip


class _Stream(soundfile.SoundFile):  # type: ignore[misc]  # soundfile has no types
    """A file that is read from its beginning to its end."""

    def seekable(self) -> bool:
        # soundfile seeks after each block, which fails at the end of a FLAC file without a length.
        return False


class SoundFile:
    def __init__(self, data: Bytes, descriptor: int, limits: DecodingLimits) -> None:
        """`data` is a mapping of the file `descriptor`."""
        self._descriptor = descriptor
        self._streamed = _streamed_wave(data)
        file = self._file = self._open()
        if file.format not in FORMATS or file.subtype not in SUBTYPES:
            raise Refusal(
                "unsupported", f"a sound of {file.format} with {file.subtype} is not accepted"
            )
        has_len = file.frames < NO_LEN
        num_samples = file.frames if has_len else 0
        audio_file.check_header(file.samplerate, file.channels, num_samples, limits)
        if not has_len:
            num_samples = self._count(limits)
        self.probe = AudioProbe(
            file.samplerate, file.channels, num_samples, f"{file.format}, {file.subtype}"
        )

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        rate = self._file.samplerate
        while len(block := self._file.read(rate, "float32", always_2d=True)):
            yield block

    def _open(self) -> _Stream:
        if self._streamed is not None:
            return _Stream(MemoryFile(self._streamed))
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return _Stream(self._descriptor, closefd=False)

    def _count(self, limits: DecodingLimits) -> int:
        """Return the number of samples by decoding them. Raises Refusal at the limit."""
        num_samples = 0
        for block in self.blocks():
            num_samples += len(block)
            audio_file.check_duration(num_samples / self._file.samplerate, limits)
        self._file = self._open()
        return num_samples


def _streamed_wave(data: Bytes) -> bytes | None:
    """Return a streamed WAV file with the length `UNKNOWN` for its samples; None for other files.

    In the header of a streamed file, the file ends before its first sample.
    """
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return None
    (file_len,) = struct.unpack("<I", data[4:8])
    position = 12
    for _ in range(MAX_CHUNKS):
        if len(head := bytes(data[position : position + 8])) < 8:
            return None
        kind, length = head[:4], int.from_bytes(head[4:], "little")
        if kind == b"data":
            if length or position < file_len < 2**32 - 1:
                return None
            return b"".join([data[: position + 4], UNKNOWN, data[position + 8 :]])
        position += 8 + length + length % 2
    return None


def is_sound(data: Bytes) -> bool:
    """Return whether these are the first bytes of one of the formats."""
    head = bytes(data[:12])
    if head[:4] in (b"fLaC", b"OggS"):
        return True
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        return True
    # Layer III of MPEG audio, or a tag before it. Layer 0 would be AAC.
    return head[:3] == b"ID3" or (
        len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 == 0x02
    )
