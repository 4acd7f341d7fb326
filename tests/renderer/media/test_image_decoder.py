import base64
import io
import random
import re
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.config.schema import RendererConfig
from shared.errors import InvalidMedia, MediaTooLarge
from shared.models.media import DecodedImage
from tests.renderer.canary import loader
from workers.renderer.media.image_decoder import decode_data_url, decode_image

LIMITS = RendererConfig()


def peak_kib() -> int:
    """Return the peak of this process's resident memory since the last `reset_peak_kib`."""
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    assert peak is not None
    return int(peak[1])


def reset_peak_kib() -> int:
    """The peak of a whole life would hide all but the worst test's memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kib()


FIELD = "messages[0].content[1].image_url.url"


def draw_image(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    rng = np.random.default_rng(7)
    pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, fmt: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def load(url: str) -> DecodedImage:
    return decode_image(loader(LIMITS).read(url, FIELD, ""), LIMITS, FIELD)


def refusal(
    data: bytes,
    kind: type[InvalidMedia | MediaTooLarge] = InvalidMedia,
    limits: RendererConfig = LIMITS,
) -> str:
    """The error's text, after checking that it contains no internals."""
    with pytest.raises(kind) as caught:
        decode_image(data, limits, FIELD)
    message = str(caught.value)
    assert caught.value.field == FIELD
    assert not re.search(r"0x[0-9a-f]{6,}|site-packages|Traceback|/tests/|BytesIO", message)
    return message


def png_header(width: int, height: int, extra: bytes = b"") -> bytes:
    """A PNG that claims a size; its data are a few bytes of zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", ihdr) + extra + chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


# ---------------------------------------------------------------------------------------------
# what is read


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
def test_the_three_formats_become_rgb(fmt: str) -> None:
    loaded = decode_image(saved(draw_image(), fmt), LIMITS, FIELD)
    assert loaded.image.mode == "RGB"
    assert loaded.image.size == (40, 30)


def test_content_decides_and_not_the_declared_type() -> None:
    url = "data:text/plain;charset=utf-8;base64," + base64.b64encode(saved(draw_image())).decode()
    assert load(url).image.size == (40, 30)
    assert load("DATA:;BASE64" + url[url.index(",") :]).source_hash == load(url).source_hash


@pytest.mark.parametrize(
    ("mode", "fmt"),
    [("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG")],
)
def test_other_modes_become_rgb(mode: str, fmt: str) -> None:
    source = draw_image(mode)
    loaded = decode_image(saved(source, fmt), LIMITS, FIELD)
    assert loaded.image.mode == "RGB"
    if fmt == "PNG":
        assert np.array_equal(np.asarray(loaded.image), np.asarray(source.convert("RGB")))


def test_transparency_is_laid_over_white() -> None:
    source = Image.new("RGBA", (3, 1))
    source.putdata([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 127)])
    pixels = np.asarray(decode_image(saved(source), LIMITS, FIELD).image)[0].tolist()
    assert pixels == [[255, 0, 0], [255, 255, 255], [128, 128, 128]]


def test_a_transparent_palette_or_colour_is_laid_over_white() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    for source, transparency in ((palette, 1), (palette.convert("RGB"), (40, 50, 60))):
        loaded = decode_image(saved(source, transparency=transparency), LIMITS, FIELD)
        assert np.asarray(loaded.image)[0].tolist() == [[10, 20, 30], [255, 255, 255]]


def test_16_bit_grey_is_scaled_and_not_clipped() -> None:
    source = Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], np.uint16))
    loaded = decode_image(saved(source), LIMITS, FIELD)
    assert np.asarray(loaded.image)[0, :, 0].tolist() == [0, 0x12, 0xFF]


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    loaded = decode_image(saved(draw_image(), exif=exif.tobytes()), LIMITS, FIELD)
    assert np.array_equal(np.asarray(loaded.image), np.rot90(np.asarray(draw_image()), -1))


def test_a_camera_jpeg_with_a_preview_is_its_first_image() -> None:
    data = saved(draw_image(), "MPO", save_all=True, append_images=[draw_image(size=(8, 6))])
    assert decode_image(data, LIMITS, FIELD).image.size == (40, 30)


@pytest.mark.parametrize("size", [(1, 1), (1, 27), (400, 1), (28, 29)])
def test_very_small_images_are_read(size: tuple[int, int]) -> None:
    assert decode_image(saved(draw_image(size=size)), LIMITS, FIELD).image.size == size


# ---------------------------------------------------------------------------------------------
# what is refused


def test_a_still_gif_is_an_image() -> None:
    expected = draw_image("P")
    for options in ({}, {"comment": b"x" * 1000}, {"interlace": 0}):
        image = decode_image(saved(expected, "GIF", **options), LIMITS, FIELD).image
        assert image.tobytes() == expected.convert("RGB").tobytes()
    whole = saved(expected, "GIF")
    for end in range(len(whole)):
        refusal(whole[:end])


@pytest.mark.parametrize("payload", ["QUJD\nREVG", "QUJDREVG ", "QUJDREU", "QUJDREU=\r\n", "QUI"])
def test_base64_may_have_white_space_and_no_padding(payload: str) -> None:
    data = decode_data_url(f"data:;base64,{payload}", LIMITS, FIELD)
    assert data == b"ABCDEF"[: len(data)]
    assert len(data) == len(payload.strip().strip("=").replace("\n", "")) * 3 // 4


@pytest.mark.parametrize("fmt", ["BMP", "TIFF", "PDF", "ICO", "EPS"])
def test_other_formats_are_named(fmt: str) -> None:
    message = refusal(saved(draw_image(size=(32, 32)), fmt))
    assert ("PostScript" if fmt == "EPS" else fmt) in message
    assert "JPEG, PNG or WEBP" in message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"8BPS\0\1",
        b"SIMPLE  = T",
        b"icns\0\0\0\0",
        b"\0\0\0 ftypheic",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"import os",
        b"\xff\xd8\xff",
        b"RIFF\4\0\0\0WEBP",
        b"\x89PNG\r\n\x1a\n",
    ],
    ids=repr,
)
def test_bytes_that_are_no_image_are_refused(data: bytes) -> None:
    refusal(data)


def test_every_other_reader_of_pillow_stays_shut() -> None:
    Image.init()
    num_refused = 0
    for fmt in sorted(set(Image.SAVE) - {"JPEG", "PNG", "WEBP", "GIF", "MPO", "JPEG2000"}):
        try:
            data = saved(draw_image(size=(32, 32)), fmt)
        except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, Warning):
            continue  # needs a mode or a tool that is not here, or is on its way out
        refusal(data)
        num_refused += 1
    assert num_refused >= 10


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "GIF"])
def test_animations_are_refused(fmt: str) -> None:
    frames = [draw_image(), draw_image().rotate(90)]
    data = saved(frames[0], fmt, save_all=True, append_images=frames[1:], duration=100)
    assert "animated" in refusal(data)


def test_an_empty_file_is_called_empty() -> None:
    assert refusal(b"") == "the image's file is empty"


def test_the_byte_limit_holds_before_base64_is_decoded() -> None:
    limits = RendererConfig(max_image_bytes=1000)
    assert "1000 bytes" in refusal(bytes(1001), MediaTooLarge, limits)
    with pytest.raises(MediaTooLarge, match="1000 bytes"):
        decode_data_url("data:;base64," + "!" * 2000, limits, FIELD)
    exact = base64.b64encode(bytes(1000)).decode()
    assert decode_data_url("data:;base64," + exact, limits, FIELD) == bytes(1000)


@pytest.mark.parametrize(
    ("size", "limit"),
    [
        ((13_000, 13_000), "33554432"),
        ((40_000, 40_000), "16384"),
        ((1, 2**31 - 1), "16384"),
        ((16_385, 1), "16384"),
    ],
)
def test_bombs_are_refused_by_their_header(size: tuple[int, int], limit: str) -> None:
    before = reset_peak_kib()
    start = time.process_time()
    message = refusal(png_header(*size), MediaTooLarge)
    assert time.process_time() - start < 0.5
    assert peak_kib() - before < 16 * 1024
    assert limit in message
    assert f"{size[0]} x {size[1]}" in message


def test_a_webp_bomb_allocates_nothing() -> None:
    data = bytearray(saved(Image.new("RGB", (16, 16)), "WEBP", lossless=True))
    position = data.index(b"VP8L") + 9
    bits = struct.unpack_from("<I", data, position)[0] >> 28 << 28
    struct.pack_into("<I", data, position, bits | 16_382 << 14 | 16_382)
    before = reset_peak_kib()
    assert "16383 x 16383" in refusal(bytes(data), MediaTooLarge)
    assert peak_kib() - before < 16 * 1024


def test_an_empty_side_is_refused() -> None:
    refusal(png_header(0, 5))
    refusal(png_header(5, 0))


def test_a_compressed_text_bomb_in_a_png_is_not_unpacked() -> None:
    data = b"key\0\0" + zlib.compress(bytes(50_000_000))
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + data))
    before = reset_peak_kib()
    assert decode_image(png_header(4, 4, chunk), LIMITS, FIELD).image.size == (4, 4)
    assert peak_kib() - before < 16 * 1024


def test_a_damaged_exif_block_has_no_orientation() -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(range(40))
    assert decode_image(saved(draw_image(), "JPEG", exif=exif), LIMITS, FIELD).image.size == (
        40,
        30,
    )


def test_truncations_and_bit_flips_end_in_an_image_or_a_refusal() -> None:
    rng = random.Random(3)
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds = [saved(draw_image(), fmt) for fmt in ("JPEG", "PNG", "WEBP")]
    seeds += [saved(draw_image(mode), "PNG") for mode in ("P", "1", "LA", "I;16")]
    seeds += [
        saved(draw_image("CMYK"), "JPEG", progressive=True),
        saved(draw_image(), "JPEG", exif=exif),
    ]
    seeds += [saved(draw_image("RGBA"), "WEBP", lossless=True)]
    assert len(seeds) == 10
    outcomes: set[str | bool] = set()
    for i in range(1000):
        data = bytearray(seeds[i % len(seeds)])
        if i % 20 < 10:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            mode = decode_image(bytes(data), LIMITS, FIELD).image.mode
        except (InvalidMedia, MediaTooLarge) as refused:
            outcomes.add("0x" in str(refused))
        else:
            outcomes.add(mode)
    assert outcomes == {"RGB", False}


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,====",
        "data:image/png;base64,QUJDQ",
        "data:image/png;base64,QUJD%3D",
        "data:image/png;base64,\uff21",
        "data:image/png,QUJD",
        "data:image/png;base64",
        "data:",
    ],
)
def test_malformed_data_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidMedia) as caught:
        load(url)
    assert caught.value.field == FIELD


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://host/a.png", "/etc/passwd", "a.png", "", " data:,", "gopher://a"],
)
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(InvalidMedia, match="must begin with"):
        load(url)
