"""Images whose files cost more than their pixels: each is refused, or costs what its pixels do.

A test does not measure time. Pillow is given a copy of the file, so it cannot spend time on what is
not in the copy: a file that is accepted must lead to the same bytes as its plain original does.
"""

import functools
import io
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from shared.config.schema import RendererConfig
from shared.decoding.still_image import (
    MAX_CHUNKS,
    MAX_FILL_BYTES,
    MAX_SCANNED_PIXELS,
    MAX_SCANS,
    MAX_SEGMENTS,
    MAX_SLACK_BYTES,
)
from shared.errors import InvalidMedia, MediaTooLarge
from tests.security import image_files as files
from tests.security.image_files import app1, chunk, exif, jpeg_with, png, riff, segment, webp
from workers.renderer.media.image_decoder import decode_image

LIMITS = RendererConfig()
FIELD = "messages[0].content[0].image_url.url"
MIB = 2**20


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that Pillow is given."""
    opened: list[bytes] = []
    really_open = Image.open

    def open_image(file: io.BytesIO, **options: Any) -> Image.Image:
        opened.append(file.getvalue())
        return really_open(file, **options)

    monkeypatch.setattr(Image, "open", open_image)
    return opened


def decode(data: bytes) -> Image.Image:
    return decode_image(data, LIMITS, FIELD).image


# -- files that are accepted, and cost no more than their pixels ----------------------------------

JPEG_EXTRAS: dict[str, Callable[[], bytes]] = {
    "a fill byte": lambda: b"\xff",
    "a megabyte of fill bytes": lambda: b"\xff" * MIB,
    "a megabyte of zeros": lambda: b"\xff\xd0" + bytes(MIB),
    "a megabyte of stuffed bytes": lambda: b"\xff\0" * (MIB // 2),
    "restart markers": lambda: b"\xff\xd0" * 100,
    "comments": lambda: segment(0xFE) * 1000,
    "an unknown application": lambda: segment(0xEB, bytes(65_000)) * 20,
    "a JFIF extension": lambda: segment(0xE0, b"JFXX\0" + bytes(60_000)) * 20,
    "a colour profile in 255 parts": lambda: b"".join(
        segment(0xE2, b"ICC_PROFILE\0" + bytes([i, 255]) + bytes(1000)) for i in range(1, 256)
    ),
    "EXIF in 100 parts": lambda: app1(b"MM\0*" + bytes(65_000)) * 100,
    "EXIF of tags without number": lambda: app1(b"II*\0\x08\0\0\0\xff\xff" + bytes(65_000)),
    "EXIF of overlapping tags": lambda: app1(exif(num_tags=5000)),
    "EXIF whose directory is itself": lambda: app1(b"II*\0\x04\0\0\0\1\0"),
    "EXIF whose directory is outside": lambda: app1(b"II*\0\xff\xff\xff\xff\1\0"),
    "EXIF that ends": lambda: app1(b"II*\0\x08\0"),
    "EXIF without a content": lambda: app1(b""),
    "EXIF of a strange orientation": lambda: app1(exif(9)),
    "EXIF of no orientation": lambda: app1(exif(0)),
    "XMP": lambda: segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"tiff:Orientation" * 4000),
    "Photoshop blocks": lambda: files.photoshop(5000) * 16,
    "an index of 4,000 pictures": lambda: files.multi_picture(4000),
    "FlashPix": lambda: segment(0xE2, b"FPXR\0" + bytes(65_000)) * 20,
}
PNG_EXTRAS: dict[str, Callable[[], bytes]] = {
    "10,000 chunks without a meaning": lambda: chunk(b"abCd") * 10_000,
    "10,000 chunks without a name": lambda: chunk(b"\0\0\0\0") * 10_000,
    "10,000 texts": lambda: b"".join(chunk(b"tEXt", b"k%d\0v" % i) for i in range(10_000)),
    "a text of a megabyte": lambda: chunk(b"tEXt", b"k\0" + b"v" * MIB),
    "100 compressed texts": lambda: chunk(b"zTXt", b"k\0\0" + files.unpacks_to(MIB)) * 100,
    "a large compressed text": lambda: chunk(b"zTXt", b"k\0\0" + files.unpacks_to(9 * MIB)),
    "100 texts of a language": lambda: chunk(b"iTXt", b"k\0\1\0\0\0" + files.unpacks_to(MIB)) * 100,
    "100 texts that are no UTF-8": lambda: (
        chunk(b"iTXt", b"k\0\1\0\0\0" + zlib.compress(b"a" * (MIB - 100) + b"\xff")) * 100
    ),
    "100 colour profiles": lambda: chunk(b"iCCP", b"k\0\0" + files.unpacks_to(MIB)) * 100,
    "a large colour profile": lambda: chunk(b"iCCP", b"k\0\0" + files.unpacks_to(9 * MIB)),
    "a profile of another method": lambda: chunk(b"iCCP", b"k\0\7abc"),
    "EXIF of overlapping tags": lambda: chunk(b"eXIf", exif(num_tags=20_000)),
    "EXIF of tags without number": lambda: chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\xff" + bytes(MIB)),
    "EXIF in a text": lambda: chunk(
        b"tEXt", b"Raw profile type exif\0\n\n\n" + b"00\n" * (MIB // 4)
    ),
    "XMP": lambda: chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + b"tiff:Orientation" * 9999),
    "an animation of one frame": lambda: chunk(b"acTL", b"\0\0\0\1" + bytes(4)),
    "gamma and chromaticity": lambda: (
        (chunk(b"gAMA", b"\0\0\0\1") + chunk(b"cHRM", bytes(32))) * 1000
    ),
}
WEBP_EXTRAS: dict[str, Callable[[], bytes]] = {
    "10,000 chunks without a meaning": lambda: riff(b"abcd") * 10_000,
    "EXIF of overlapping tags": lambda: riff(b"EXIF", exif(num_tags=20_000)),
    "EXIF of tags without number": lambda: riff(b"EXIF", b"MM\0*\0\0\0\x08\xff\xff" + bytes(MIB)),
    "a large colour profile": lambda: riff(b"ICCP", bytes(MIB)),
    "many colour profiles": lambda: riff(b"ICCP", b"x") * 1000,
    "XMP": lambda: riff(b"XMP ", b"tiff:Orientation" * 9999),
    "a second frame": lambda: files.webp_frame(lossless=False),
}
Accepted = tuple[Callable[[], bytes], Callable[[], bytes]]
ACCEPTED: dict[str, Accepted] = {
    **{
        f"JPEG, {name}": (functools.partial(lambda make: jpeg_with(make()), make), files.jpeg)
        for name, make in JPEG_EXTRAS.items()
    },
    **{
        f"PNG, {place} the pixels, {name}": (
            functools.partial(lambda make, place: png(**{place: make()}), make, place),
            png,
        )
        for place in ("before", "after")
        for name, make in PNG_EXTRAS.items()
    },
    **{
        f"WEBP, {name}": (functools.partial(lambda make: webp(after=make()), make), webp)
        for name, make in WEBP_EXTRAS.items()
    },
    "JPEG, a megabyte behind the end": (lambda: files.jpeg() + b"\xff\xda\0" * MIB, files.jpeg),
    "JPEG, another one behind the end": (lambda: files.jpeg() * 20, files.jpeg),
    "PNG, pixels in pieces of a byte": (lambda: png(pixels=files.pieces(1)), png),
    "PNG, 10,000 empty pieces": (lambda: png(chunk(b"IDAT") * 10_000), png),
    "PNG, pixels after a gap": (lambda: png(after=chunk(b"tIME") + chunk(b"IDAT", b"x" * 99)), png),
    "PNG, a megabyte behind the end": (lambda: png() + chunk(b"IDAT") * 99_999, png),
    "WEBP, flags of chunks that are not there": (lambda: webp(flags=0x2C), webp),
    "WEBP, a profile before the frame": (lambda: webp(riff(b"ICCP", bytes(99)), flags=0x20), webp),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_pillow_is_given_what_makes_the_pixels_alone(inputs: list[bytes], name: str) -> None:
    make, plain = ACCEPTED[name]
    attacked, expected = decode(make()), decode(plain())
    assert inputs[0] == inputs[1]
    assert len(inputs[0]) <= len(plain())
    assert np.array_equal(np.asarray(attacked), np.asarray(expected))


# -- files that are refused -----------------------------------------------------------------------

DAMAGED = "the image is damaged or incomplete"
HUFFMAN = "a JPEG must be baseline or progressive, with Huffman codes"
SEGMENTS, SCANS = f"more than {MAX_SEGMENTS} segments", f"more than {MAX_SCANS} scans"
FILL, PNG_CHUNKS = (
    f"more than {MAX_FILL_BYTES} fill bytes",
    f"more than {MAX_CHUNKS} chunks of a PNG",
)
WEBP_CHUNKS = f"more than {MAX_CHUNKS} chunks of a WEBP"
PACKED = "compressed bytes are over the limit of"
SCANNED = f"pixels are over the limit of {MAX_SCANNED_PIXELS}"
ANIMATED = "animated images are not accepted"

REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "JPEG, empty segments": (lambda: jpeg_with(segment(0xFE) * MAX_SEGMENTS), SEGMENTS),
    "JPEG, a million of them": (lambda: jpeg_with(segment(0xFE) * 10**6), SEGMENTS),
    "JPEG, restart markers": (lambda: jpeg_with(b"\xff\xd1" * MAX_SEGMENTS), SEGMENTS),
    "JPEG, markers without a content": (lambda: jpeg_with(b"\xff\1" * MAX_SEGMENTS), SEGMENTS),
    "JPEG, tables": (lambda: jpeg_with(segment(0xDD, b"\0\1") * MAX_SEGMENTS), SEGMENTS),
    "JPEG, EXIF": (lambda: jpeg_with(app1(exif(1)) * MAX_SEGMENTS), SEGMENTS),
    "JPEG, tables between scans": (
        lambda: files.in_scan(segment(0xDD, b"\0\0") * MAX_SEGMENTS),
        SEGMENTS,
    ),
    "JPEG, fill bytes in its scan": (lambda: files.in_scan(b"\xff" * (MAX_FILL_BYTES + 4)), FILL),
    "JPEG, a megabyte of them": (lambda: files.in_scan(b"\xff" * MIB), FILL),
    "JPEG, runs of fill bytes": (lambda: files.in_scan(b"\xff\xff\xff\0" * MAX_FILL_BYTES), FILL),
    "JPEG, one scan too many": (lambda: files.jpeg_of_scans(MAX_SCANS + 1), SCANS),
    "JPEG, 1000 scans": (lambda: files.jpeg_of_scans(1000), SCANS),
    "JPEG, 20 scans of 64 Mi pixels": (
        lambda: files.jpeg_of_scans(20, (8192, 8192)),
        "8192 x 8192",
    ),
    "JPEG, 33 scans of 32 Mi pixels": (lambda: files.jpeg_of_scans(33, (8192, 4096)), SCANNED),
    "JPEG, 33 scans of CMYK": (lambda: files.jpeg_of_scans(33, (8192, 4096), "CMYK"), SCANNED),
    "JPEG, 66 scans of 16 Mi pixels": (lambda: files.jpeg_of_scans(66, (4096, 4096)), SCANNED),
    "JPEG, 98 scans of 16 Mi pixels": (lambda: files.jpeg_of_scans(98, (4096, 4096)), SCANNED),
    **{
        f"JPEG, process {code:#x}": (functools.partial(files.with_frame, code), HUFFMAN)
        for code in (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
    },
    "JPEG, arithmetic tables": (lambda: jpeg_with(segment(0xCC, b"\0\0")), HUFFMAN),
    "JPEG, two frames": (
        lambda: jpeg_with(segment(0xC0, b"\x08\0\x40\0\x40\3\1\x22\0\2\x11\1\3\x11\1")),
        DAMAGED,
    ),
    "JPEG, two beginnings": (lambda: jpeg_with(b"\xff\xd8"), DAMAGED),
    "JPEG, an unknown marker": (lambda: jpeg_with(b"\xff\x02"), DAMAGED),
    "JPEG, a segment shorter than its length": (lambda: jpeg_with(b"\xff\xfe\0\1"), DAMAGED),
    "JPEG, a segment longer than the file": (lambda: files.jpeg()[:-2] + b"\xff\xfe\xff", DAMAGED),
    "JPEG, without an end": (lambda: files.jpeg()[:-2], DAMAGED),
    "JPEG, half": (lambda: files.jpeg()[: len(files.jpeg()) // 2], DAMAGED),
    "JPEG, without a frame": (lambda: b"\xff\xd8" + segment(0xFE) + b"\xff\xd9", DAMAGED),
    "JPEG, nothing": (lambda: b"\xff\xd8\xff", DAMAGED),
    "PNG, empty chunks": (lambda: png(chunk(b"abCd") * MAX_CHUNKS), PNG_CHUNKS),
    "PNG, empty chunks after the pixels": (
        lambda: png(after=chunk(b"abCd") * MAX_CHUNKS),
        PNG_CHUNKS,
    ),
    "PNG, a million of them": (lambda: png(chunk(b"abCd") * 10**6), PNG_CHUNKS),
    "PNG, empty pieces": (lambda: png(chunk(b"IDAT") * MAX_CHUNKS), PNG_CHUNKS),
    "PNG, texts": (lambda: png(chunk(b"tEXt", b"a\0b") * MAX_CHUNKS), PNG_CHUNKS),
    "PNG, empty blocks": (lambda: png(pixels=files.empty_blocks(MAX_SLACK_BYTES)), PACKED),
    "PNG, 8 MiB of them": (lambda: png(pixels=files.empty_blocks(8 * MIB // 5)), PACKED),
    "PNG, bytes behind the pixels": (
        lambda: png(pixels=chunk(b"IDAT", files.packed_pixels() + bytes(MIB))),
        PACKED,
    ),
    "PNG, two headers": (lambda: png(png()[8:33]), DAMAGED),
    "PNG, two palettes": (lambda: png(chunk(b"PLTE", bytes(768)) * 2), DAMAGED),
    "PNG, a header at the end": (lambda: png()[:8] + png()[33:] + png()[8:33], DAMAGED),
    "PNG, a short header": (lambda: png()[:8] + chunk(b"IHDR", bytes(4)) + png()[33:], DAMAGED),
    "PNG, a header that was changed": (lambda: png()[:18] + b"\1" + png()[19:], DAMAGED),
    "PNG, without pixels": (lambda: png(pixels=b""), DAMAGED),
    "PNG, half of its pixels": (lambda: png()[: 50 + len(files.packed_pixels()) // 2], DAMAGED),
    "PNG, animated": (lambda: png(chunk(b"acTL", b"\0\0\0\2" + bytes(4))), ANIMATED),
    "PNG, frames without number": (lambda: png(chunk(b"acTL", b"\xff" * 8)), ANIMATED),
    "WEBP, empty chunks": (lambda: webp(after=riff(b"abcd") * MAX_CHUNKS), WEBP_CHUNKS),
    "WEBP, empty chunks before": (lambda: webp(riff(b"abcd") * MAX_CHUNKS), WEBP_CHUNKS),
    "WEBP, profiles": (lambda: webp(riff(b"ICCP", b"x") * MAX_CHUNKS), WEBP_CHUNKS),
    "WEBP, animated": (lambda: webp(riff(b"ANIM", bytes(6)), flags=2), ANIMATED),
    "WEBP, a frame of an animation": (lambda: webp(riff(b"ANMF", bytes(16)), flags=2), ANIMATED),
    "WEBP, without a frame": (lambda: webp()[:30], DAMAGED),
    "WEBP, half of its frame": (lambda: webp()[: 30 + len(files.webp_frame()) // 2], DAMAGED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_costly_file_is_refused_before_it_is_decoded(inputs: list[bytes], name: str) -> None:
    make, complaint = REFUSED[name]
    with pytest.raises((InvalidMedia, MediaTooLarge)) as caught:
        decode(make())
    assert complaint in caught.value.message
    assert caught.value.field == FIELD
    # Files that reach a decoder are small, or their pixels are not read.
    assert all(len(file) < MIB for file in inputs)


# -- the orientation, which is all that is read of metadata ---------------------------------------

HOLDERS: dict[str, Callable[[Image.Image, bytes], bytes]] = {
    "JPEG": lambda image, tiff: files.saved(image, "JPEG", exif=tiff),
    "PNG": lambda image, tiff: files.saved(image, "PNG", exif=tiff),
    "WEBP": lambda image, tiff: files.saved(image, "WEBP", exif=tiff, lossless=True),
}


@pytest.mark.parametrize("order", ["<", ">"], ids=["II", "MM"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fmt", HOLDERS)
def test_orientations_are_those_of_pillow(fmt: str, orientation: int, order: str) -> None:
    data = HOLDERS[fmt](files.picture(size=(40, 24)), b"Exif\0\0" + exif(orientation, order))
    theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(np.asarray(decode(data)), np.asarray(theirs))


XMP = b'<rdf:Description tiff:Orientation="6"/>'
XMP_HOLDERS = {
    "JPEG": lambda: jpeg_with(segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP)),
    "PNG": lambda: png(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)),
    "WEBP": lambda: webp(after=riff(b"XMP ", XMP), flags=4),
}


@pytest.mark.parametrize("fmt", XMP_HOLDERS)
def test_the_orientation_of_xmp_counts_without_another(fmt: str) -> None:
    data = XMP_HOLDERS[fmt]()
    theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(np.asarray(decode(data)), np.asarray(theirs))
