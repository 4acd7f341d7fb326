"""Copies of image files with only the parts that are needed for their pixels. Pure.

Pillow reads metadata in Python and holds the GIL meanwhile: profiles that expand from a kilobyte to
a megabyte, fill bytes one at a time, directories with overlapping entries. Only the orientation is
needed. A file is therefore copied without metadata, in a limited number of steps. The cost of the
copy depends only on its pixels, its scans and its compressed bytes.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from shared.decoding.refusal import Refusal

MAX_SEGMENTS = 4096
"""Limit on the segments of a JPEG. A file of 32 MiB in segments of 64 KiB has 512."""
MAX_CHUNKS = 2**16
"""Limit on the chunks of a PNG or WEBP. A file of 32 MiB in chunks of 8 KiB has 4,096."""
MAX_SCANS = 100
"""Limit on the scans of a JPEG. Encoders write about ten."""
MAX_SCANNED_PIXELS = 2**30
"""Limit on scans times pixels, because a decoder visits all pixels in every scan, and a scan may be
31 bytes long. An image of 32 Mi pixels may have 32 scans."""
MAX_FILL_BYTES = 4096
"""Limit on the fill bytes of a scan. At every read, a decoder starts again before a run of fill
bytes, so a run takes quadratic time."""
MAX_SLACK_BYTES = 2**16
"""Limit on the compressed bytes of a PNG, in addition to twice the bytes of its pixels."""
MAX_METADATA_BYTES = 2**16
"""Number of first bytes of a metadata block that are searched for the orientation. In a JPEG, a
block is not longer."""

MAX_BLOCKS = 2**18
"""Limit on the blocks of a GIF. A file of 32 MiB in blocks of 255 bytes has 131,586."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SCAN_END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_EXIF_HEAD, _XMP_HEAD, _PNG_XMP_HEAD = (
    b"Exif\0\0",
    b"http://ns.adobe.com/xap/1.0/\0",
    b"XML:com.adobe.xmp\0",
)
_ORIENTATION_TAG, _SHORT = 0x0112, 3

_TEM, _FIRST_FRAME, _SOI, _EOI, _SOS = 0x01, 0xC0, 0xD8, 0xD9, 0xDA
_RESTARTS = range(0xD0, 0xD8)
_TABLES = (0xC4, 0xDB, 0xDD)
_FRAMES = (0xC0, 0xC1, 0xC2)
"""Baseline, extended and progressive, with Huffman codes."""
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - set(_TABLES)
_APP0, _APP1, _APP14 = 0xE0, 0xE1, 0xEE

_PNG_HEADER = struct.Struct(">IIBB")
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_RIFF_CHUNK = struct.Struct("<4sI")
_HAS_ALPHA = 0x10
_GIF_FRAME, _GIF_END, _GIF_CONTROL = 0x2C, 0x3B, b"!\xf9"


@dataclass(frozen=True, slots=True)
class StillImage:
    file: bytes
    """Copy of the file with only the parts that are needed for its pixels."""
    num_scans: int
    orientation: int
    """Orientation from 1 to 8, as in EXIF."""

    def check_scans(self, size: tuple[int, int]) -> None:
        """Raise Refusal if the scans of an image of this size take too long."""
        num_pixels = self.num_scans * size[0] * size[1]
        if num_pixels > MAX_SCANNED_PIXELS:
            raise Refusal(
                "invalid",
                f"{self.num_scans} scans of {size[0]} x {size[1]} = {num_pixels} pixels are over"
                f" the limit of {MAX_SCANNED_PIXELS}",
            )


def read_still_image(data: bytes) -> StillImage | None:
    """Return a copy of a file without metadata; None for another format.

    Raises Refusal for more parts than the limits allow, for an animation, and for some damage.
    Other damage is found by the decoder.
    """
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(data)
        if data.startswith(PNG_SIGNATURE):
            return _read_png(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _read_webp(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _read_gif(data)
    except (struct.error, IndexError):
        raise damaged() from None
    return None


def damaged() -> Refusal:
    return Refusal("invalid", "the image is damaged or incomplete")


def _animated() -> Refusal:
    return Refusal("invalid", "animated images are not accepted; send a single frame")


def _over(limit: int, of: str) -> Refusal:
    return Refusal("invalid", f"more than {limit} {of} are not accepted")


# -- JPEG -----------------------------------------------------------------------------------------


class _Jpeg:
    """Parts of a JPEG file that have been read."""

    def __init__(self) -> None:
        self.has_frame = False
        self.num_scans = 0
        self.exif = self.xmp = b""
        self.parts = [b"\xff\xd8"]

    def is_kept(self, code: int, content: bytes) -> bool:
        """Return whether a decoder needs the segment, and record its metadata."""
        if code in _FRAMES:
            if self.has_frame:
                raise damaged()
            self.has_frame = True
            return True
        if code in _OTHER_FRAMES:
            raise Refusal("invalid", "a JPEG must be baseline or progressive, with Huffman codes")
        if code == _APP1:
            if content.startswith(_EXIF_HEAD):
                self.exif = self.exif or content
            elif content.startswith(_XMP_HEAD):
                self.xmp = self.xmp or content
            return False
        if code in (_APP0, _APP14):  # They contain the coding of colours.
            return content.startswith((b"JFIF\0", b"Adobe"))
        return code in _TABLES or code == _SOS

    def check_scan(self, scan: bytes) -> None:
        """Count a scan. Raises Refusal."""
        self.num_scans += 1
        if self.num_scans > MAX_SCANS:
            raise _over(MAX_SCANS, "scans of a JPEG")
        if scan.count(b"\xff\xff") > MAX_FILL_BYTES // 2:
            raise _over(MAX_FILL_BYTES, "fill bytes in a scan of a JPEG")


def _read_jpeg(data: bytes) -> StillImage:
    jpeg, end = _Jpeg(), 2
    for _ in range(MAX_SEGMENTS):
        # Bytes that decoders skip before a marker are not copied.
        if (marker := _MARKER.search(data, end)) is None:
            break
        start, code = marker.start(), data[marker.start() + 1]
        end = start + 2
        if code == _EOI:
            # Without it, a decoder reports an incomplete file.
            jpeg.parts.append(b"\xff\xd9")
            break
        if code == _TEM or code in _RESTARTS:
            continue
        if code < _FIRST_FRAME or code == _SOI:
            raise damaged()
        end += int.from_bytes(data[end : end + 2], "big")
        if not start + 4 <= end <= len(data):
            raise damaged()
        if jpeg.is_kept(code, data[start + 4 : end]):
            if code == _SOS:
                begin, match = end, _SCAN_END.search(data, end)
                end = match.start() if match else len(data)
                jpeg.check_scan(data[begin:end])
            jpeg.parts.append(data[start:end])
    else:
        raise _over(MAX_SEGMENTS, "segments of a JPEG")
    orientation = _orientation(jpeg.exif, jpeg.xmp)
    return StillImage(b"".join(jpeg.parts), jpeg.num_scans, orientation)


# -- PNG ------------------------------------------------------------------------------------------


class _Png:
    """Parts of a PNG file that have been read."""

    def __init__(self) -> None:
        self.head: dict[bytes, bytes] = {}
        self.exif = self.xmp = b""
        self.pixels: list[bytes] = []

    def add(self, kind: bytes, content: bytes, whole: bytes) -> None:
        """Add a chunk of another kind than IDAT. Raises Refusal."""
        if kind == b"eXIf":
            self.exif = self.exif or content
        elif kind == b"iTXt" and content.startswith(_PNG_XMP_HEAD):
            self.xmp = self.xmp or content
        elif self.pixels:
            return
        elif kind in (b"IHDR", b"PLTE", b"tRNS"):
            if kind in self.head or (kind != b"IHDR" and not self.head):
                raise damaged()
            # The copy includes the length and the checksum, which Pillow verifies.
            self.head[kind] = whole
        elif kind == b"acTL" and int.from_bytes(content[:4], "big") > 1:
            raise _animated()

    def check_pixels(self, num_bytes: int) -> None:
        """Raise Refusal for more compressed bytes than an image of this size needs."""
        if b"IHDR" not in self.head:
            raise damaged()
        width, height, bits, colours = _PNG_HEADER.unpack_from(self.head[b"IHDR"], 8)
        row_bytes = 1 + -(-width * bits * _PNG_CHANNELS.get(colours, 0) // 8)
        limit = 2 * height * row_bytes + MAX_SLACK_BYTES
        if num_bytes > limit:
            raise Refusal(
                "invalid",
                f"{num_bytes} compressed bytes are over the limit of {limit} for a PNG of"
                f" {width} x {height}",
            )


def _read_png(data: bytes) -> StillImage:
    png = _Png()
    is_last = False  # whether the pixels are complete, because another chunk follows them
    for kind, start, end in _png_chunks(data):
        if kind != b"IDAT":
            is_last = bool(png.pixels)
            content = data[start : min(end, start + MAX_METADATA_BYTES)]
            png.add(kind, content, data[start - 8 : end + 4])
        elif not is_last:
            png.pixels.append(data[start:end])
    packed = b"".join(png.pixels)
    png.check_pixels(len(packed))
    parts = [PNG_SIGNATURE, *png.head.values(), _PNG_CHUNK.pack(len(packed), b"IDAT"), packed]
    # Pillow does not verify the checksum of pixels.
    parts += [bytes(4), _PNG_CHUNK.pack(0, b"IEND"), bytes(4)]
    return StillImage(b"".join(parts), 1, _orientation(png.exif, png.xmp))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of the content of each chunk, up to the end or the first damage."""
    position = len(PNG_SIGNATURE)
    for _ in range(MAX_CHUNKS):
        if position + 8 > len(data):
            return
        length, kind = _PNG_CHUNK.unpack_from(data, position)
        start, end = position + 8, position + 8 + length
        if kind == b"IEND" or (kind != b"IDAT" and end + 4 > len(data)):
            return
        yield kind, start, min(end, len(data))
        position = end + 4
    raise _over(MAX_CHUNKS, "chunks of a PNG")


# -- WEBP -----------------------------------------------------------------------------------------


def _read_webp(data: bytes) -> StillImage:
    parts: list[bytes] = []
    exif = xmp = b""
    has_frame = False
    for kind, start, end in _webp_chunks(data):
        if kind in (b"ANIM", b"ANMF"):
            raise _animated()
        if kind == b"EXIF":
            exif = exif or data[start : min(end, start + MAX_METADATA_BYTES)]
        elif kind == b"XMP ":
            xmp = xmp or data[start : min(end, start + MAX_METADATA_BYTES)]
        elif kind == b"VP8X" and not parts:
            # Its flags announce other chunks. Only transparency is copied.
            flags = bytes([data[start] & _HAS_ALPHA])
            parts += data[start - 8 : start], flags, data[start + 1 : end]
        elif kind in (b"ALPH", b"VP8 ", b"VP8L") and not has_frame:
            parts.append(data[start - 8 : end + (end - start) % 2])
            has_frame = kind != b"ALPH"
    body = b"WEBP" + b"".join(parts)
    return StillImage(_RIFF_CHUNK.pack(b"RIFF", len(body)) + body, 1, _orientation(exif, xmp))


def _webp_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of the content of each chunk."""
    position = 12
    for _ in range(MAX_CHUNKS):
        if position + 8 >= len(data):
            return
        kind, length = _RIFF_CHUNK.unpack_from(data, position)
        start, end = position + 8, position + 8 + length
        yield kind, start, min(end, len(data))
        position = end + length % 2
    raise _over(MAX_CHUNKS, "chunks of a WEBP")


# -- GIF ------------------------------------------------------------------------------------------


def _read_gif(data: bytes) -> StillImage:
    position = 13 + _table_len(data[10])
    parts, has_frame = [data[:position]], False
    while data[position] != _GIF_END:
        start = position
        if data[position] == _GIF_FRAME:
            if has_frame:
                raise _animated()
            has_frame = True
            position += 11 + _table_len(data[position + 9])
        else:
            position += 2
        is_kept = data[start] == _GIF_FRAME or data[start : start + 2] == _GIF_CONTROL
        position = _after_blocks(data, position)
        if is_kept:
            parts.append(data[start:position])
    return StillImage(b"".join([*parts, bytes([_GIF_END])]), 1, 1)


def _table_len(flags: int) -> int:
    """Return the number of bytes of the colour table that the flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes, position: int) -> int:
    """Return the position after the data blocks that begin here. The last one is empty."""
    for _ in range(MAX_BLOCKS):
        length = data[position]
        position += 1 + length
        if not length:
            return position
    raise _over(MAX_BLOCKS, "blocks of a GIF")


# -- orientation ----------------------------------------------------------------------------------


def _orientation(exif: bytes, xmp: bytes) -> int:
    """Return the orientation from EXIF or else from XMP; 1 if there is none."""
    if (number := _exif_orientation(exif.removeprefix(_EXIF_HEAD))) is not None:
        return number if 1 <= number <= 8 else 1
    match = _XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match else 1


def _exif_orientation(exif: bytes) -> int | None:
    """Return the orientation in the first directory of a TIFF file."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        return None
    (offset,) = struct.unpack_from(f"{order}I", exif, 4)
    count = exif[offset : offset + 2]
    if len(count) < 2:
        return None
    num_bytes = 12 * struct.unpack(f"{order}H", count)[0]
    entries = exif[offset + 2 : offset + 2 + num_bytes]
    entries = entries[: len(entries) // 12 * 12]
    for tag, kind, num_values, value in struct.iter_unpack(f"{order}HHIH2x", entries):
        if tag == _ORIENTATION_TAG and kind == _SHORT and num_values == 1:
            return int(value)
    return None
