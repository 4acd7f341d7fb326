"""Image files with what no encoder writes: parts without number, and metadata that costs."""

import functools
import io
import struct
import zlib

import numpy as np
from PIL import Image

SIDE = 64


def saved(image: Image.Image, fmt: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


def picture(mode: str = "RGB", size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    pixels = np.random.default_rng(5).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


# -- JPEG -----------------------------------------------------------------------------------------


@functools.cache
def jpeg(
    mode: str = "RGB", size: tuple[int, int] = (SIDE, SIDE), progressive: bool = False
) -> bytes:
    return saved(picture(mode, size), "JPEG", progressive=progressive)


def segment(code: int, content: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, code, len(content) + 2) + content


def jpeg_with(extra: bytes, at: int = 2, **options: bool) -> bytes:
    """Return a JPEG with bytes between two of its segments, by default in front of all."""
    data = jpeg(**options)
    return data[:at] + extra + data[at:]


def in_scan(extra: bytes) -> bytes:
    """Return a JPEG with bytes in the middle of its only scan."""
    data = jpeg()
    middle = (data.rindex(b"\xff\xda") + len(data)) // 2
    while data[middle - 1] == 0xFF or data[middle] == 0xFF:
        middle += 1
    return data[:middle] + extra + data[middle:]


def jpeg_of_scans(num_scans: int, size: tuple[int, int] = (SIDE, SIDE), mode: str = "RGB") -> bytes:
    """Return a progressive JPEG of one colour, whose last scan comes again and again."""
    data = saved(Image.new(mode, size), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * (num_scans - data.count(b"\xff\xda") + 1) + data[-2:]


def with_frame(code: int) -> bytes:
    """Return a JPEG that says of itself to be of another process."""
    return jpeg().replace(b"\xff\xc0\x00\x11", bytes([0xFF, code]) + b"\x00\x11", 1)


# -- metadata -------------------------------------------------------------------------------------


def exif(orientation: int | None = None, order: str = "<", *, num_tags: int = 0) -> bytes:
    """Return a TIFF file; the values of its further tags are all of the file, each."""
    tags = [(tag, 7, 12 * num_tags, 8) for tag in range(0x8000, 0x8000 + num_tags)]
    body = struct.pack(f"{order}H", len(tags) + (orientation is not None))
    if orientation is not None:
        body += struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0)
    body += b"".join(struct.pack(f"{order}HHII", *tag) for tag in tags)
    return (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8) + body + bytes(4)


def app1(tiff: bytes) -> bytes:
    return segment(0xE1, b"Exif\0\0" + tiff)


def photoshop(num_blocks: int) -> bytes:
    return segment(0xED, b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * num_blocks)


def multi_picture(num_images: int) -> bytes:
    """Return the index of a file of many pictures, all at the same place."""
    place = 8 + 2 + 3 * 12 + 4
    tags = struct.pack("<HHI4s", 0xB000, 7, 4, b"0100")
    tags += struct.pack("<HHII", 0xB001, 4, 1, num_images)
    tags += struct.pack("<HHII", 0xB002, 7, 16 * num_images, place)
    index = b"II*\0" + struct.pack("<IH", 8, 3) + tags + bytes(4) + bytes(16 * num_images)
    return segment(0xE2, b"MPF\0" + index)


# -- PNG ------------------------------------------------------------------------------------------

COLOURS = {"L": 0, "RGB": 2, "P": 3, "LA": 4, "RGBA": 6}


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


@functools.cache
def packed_pixels() -> bytes:
    rows = np.asarray(picture("L"))
    return zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))


def png(before: bytes = b"", after: bytes = b"", pixels: bytes | None = None) -> bytes:
    """Return a grey PNG with chunks around its pixels, which are chunks themselves."""
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    pixels = chunk(b"IDAT", packed_pixels()) if pixels is None else pixels
    body = chunk(b"IHDR", header) + before + pixels + after + chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + body


def pieces(num_bytes: int) -> bytes:
    """Return the pixels in chunks of `num_bytes`."""
    data = packed_pixels()
    return b"".join(
        chunk(b"IDAT", data[at : at + num_bytes]) for at in range(0, len(data), num_bytes)
    )


def empty_blocks(num_blocks: int) -> bytes:
    """Return the pixels after empty blocks of deflate."""
    data = packed_pixels()
    return chunk(b"IDAT", data[:2] + b"\0\0\0\xff\xff" * num_blocks + data[2:])


def unpacks_to(num_bytes: int) -> bytes:
    return zlib.compress(bytes(num_bytes), 9)


# -- WEBP -----------------------------------------------------------------------------------------


def riff(kind: bytes, content: bytes = b"") -> bytes:
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


@functools.cache
def webp_frame(*, lossless: bool = True) -> bytes:
    return saved(picture(), "WEBP", lossless=lossless)[12:]


def webp(before: bytes = b"", after: bytes = b"", flags: int = 0) -> bytes:
    """Return an extended WEBP with chunks around its frame."""
    head = riff(b"VP8X", struct.pack("<I", flags) + struct.pack("<I", SIDE - 1)[:3] * 2)
    return riff(b"RIFF", b"WEBP" + head + before + webp_frame() + after)
