"""Frames and durations of animated images, counted from the blocks of their files. Pure.

Pillow would decode every frame to get its duration. Here the blocks are skipped, and counting stops
at a limit. Numbers in headers are not trusted.
"""

import struct
from dataclasses import dataclass

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# A GIF of up to 128 MiB in blocks of 255 bytes has fewer.
MAX_BLOCKS = 2**19
# Browsers use this delay for frames with a shorter delay than the minimum.
DEFAULT_GIF_DELAY_S = 0.1
MIN_GIF_DELAY_S = 0.02


@dataclass(frozen=True, slots=True)
class Animation:
    num_frames: int
    duration_s: float


def is_animation(data: bytes) -> bool:
    """Return whether a file with these first bytes has a format that may be animated."""
    head = data[:12]
    is_webp = head[:4] == b"RIFF" and head[8:] == b"WEBP"
    return is_webp or head.startswith((b"GIF8", PNG_SIGNATURE))


def count_animation(data: bytes, max_frames: int) -> Animation:
    """Count the frames, up to `max_frames`. Raises ValueError for invalid blocks."""
    if data.startswith(PNG_SIGNATURE):
        delays = _png_delays(data, max_frames)
    elif data.startswith(b"RIFF"):
        delays = _webp_delays(data, max_frames)
    else:
        delays = _gif_delays(data, max_frames)
    # A still image is a video of one frame.
    return Animation(max(1, len(delays)), sum(delays))


def _png_delays(data: bytes, max_frames: int) -> list[float]:
    delays: list[float] = []
    position = len(PNG_SIGNATURE)
    while position + 8 <= len(data) and len(delays) < max_frames:
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"fcTL" and position + 32 <= len(data):
            numerator, denominator = struct.unpack_from(">HH", data, position + 28)
            delays.append(numerator / (denominator or 100))
        position += 12 + length
    return delays


def _webp_delays(data: bytes, max_frames: int) -> list[float]:
    delays: list[float] = []
    position = 12
    while position + 8 <= len(data) and len(delays) < max_frames:
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == b"ANMF":
            delays.append(int.from_bytes(data[position + 20 : position + 23], "little") / 1000)
        position += 8 + length + length % 2
    return delays


def _gif_delays(data: bytes, max_frames: int) -> list[float]:
    delays: list[float] = []
    delay_s = 0.0
    position = 13 + _table_bytes(data[10:11])
    num_blocks = 0
    while position < len(data) and len(delays) < max_frames:
        kind = data[position : position + 1]
        if kind == b"!":
            if data[position + 1 : position + 3] == b"\xf9\x04":
                delay_s = int.from_bytes(data[position + 4 : position + 6], "little") / 100
            position += 2
        elif kind == b",":
            delays.append(delay_s if delay_s >= MIN_GIF_DELAY_S else DEFAULT_GIF_DELAY_S)
            delay_s = 0.0
            position += 11 + _table_bytes(data[position + 9 : position + 10])
        else:
            break
        while position < len(data) and (length := data[position]):
            position += 1 + length
            num_blocks += 1
            if num_blocks > MAX_BLOCKS:
                raise ValueError("more blocks than a GIF of this size needs")
        position += 1
    return delays


def _table_bytes(flags: bytes) -> int:
    """Return the length of the colour table declared by these flags."""
    if not flags or not flags[0] & 0x80:
        return 0
    return int(3 * 2 ** ((flags[0] & 7) + 1))
