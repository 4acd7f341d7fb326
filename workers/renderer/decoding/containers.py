"""Accepted containers, recognized by a file's first bytes."""

from dataclasses import dataclass
from typing import Protocol


class Bytes(Protocol):
    """Bytes of a file: a mapping of it, or `bytes`."""

    def __getitem__(self, part: slice, /) -> bytes: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    """Name in FFmpeg."""
    title: str
    """Name in error messages."""


class MemoryFile:
    """A file-like object over bytes, for reading."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._position = 0

    def read(self, num_bytes: int = -1) -> bytes:
        end = len(self._data) if num_bytes < 0 else self._position + num_bytes
        read = self._data[self._position : end]
        self._position += len(read)
        return read

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, len(self._data))[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position


MP4 = Container("mov", "MP4")
MATROSKA = Container("matroska", "WebM or Matroska")
AVI = Container("avi", "AVI")
ADTS = Container("aac", "AAC")
MP3 = Container("mp3", "MP3")
# Containers of libsndfile's formats, by the first bytes of a file, for files that it cannot read.
_SOUNDS = {
    b"RIFF": (Container("wav", "WAV"),),
    b"fLaC": (Container("flac", "FLAC"),),
    b"OggS": (Container("ogg", "OGG"),),
    b"ID3": (MP3, ADTS),
}
# First boxes of MP4 files; files from before the introduction of `ftyp` begin with another one.
_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")


def sound_containers(data: Bytes) -> tuple[Container, ...]:
    """Return the possible containers of a file in one of libsndfile's formats."""
    head = bytes(data[:4])
    return next((read_as for magic, read_as in _SOUNDS.items() if head.startswith(magic)), (MP3,))


def find_container(data: Bytes) -> Container | None:
    head = bytes(data[:12])
    if head[4:8] in _FIRST_BOXES:
        return MP4
    if head[:4] == b"\x1aE\xdf\xa3":
        return MATROSKA
    if head[:4] == b"RIFF" and head[8:] == b"AVI ":
        return AVI
    if head[:1] == b"\xff" and head[1:2] and head[1] & 0xF6 == 0xF0:
        return ADTS
    return None
