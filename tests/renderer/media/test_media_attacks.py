"""Images that are meant to harm: rows S16, S17, S19 and S31."""

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from ops.rendering import render
from shared.config.schema import EngineConfig, ModelConfig, RendererConfig
from shared.decoding.still_image import MAX_SCANS
from shared.errors import InvalidMedia, InvalidRequest
from shared.models.media import DecodedImage
from shared.protocol.multimodal import IMAGE
from shared.protocol.requests import ContentPart, ImagePart, ImageURL, Message, TextPart
from tests.request_path import pack, run, unpack
from workers.engine.core.engine import EngineCore
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.renderer.media.image_decoder import decode_image
from workers.renderer.processing.processor import Processor
from workers.settings import DEMO_MODEL

ROOT = Path(__file__).parents[3]
FIELD = "messages[0].content[0].image_url.url"
LIMITS = RendererConfig()


def saved(image: Image.Image, fmt: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


# -- S16: small files of large images -----------------------------------------------------------


def png(
    width: int, height: int, *, extra: bytes = b"", pixels: bytes = bytes(1000), mode: int = 0
) -> bytes:
    """8 bits of grey; The number of `pixels` may differ from the header."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0)
    body = chunk(b"IHDR", ihdr) + extra + chunk(b"IDAT", zlib.compress(pixels, 1))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


def animated_png(num_frames: int) -> bytes:
    frame = chunk(b"fcTL", struct.pack(">5I2H2B", 0, 4, 4, 0, 0, 1, 100, 0, 0))
    frames = (
        frame + chunk(b"fdAT", struct.pack(">I", i) + zlib.compress(bytes(20)))
        for i in range(num_frames)
    )
    extra = chunk(b"acTL", struct.pack(">II", num_frames, 0)) + frame
    return png(4, 4, extra=extra, pixels=bytes(20))[:-12] + b"".join(frames)


def webp(canvas: tuple[int, int], num_frames: int) -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)

    def u24(*numbers: int) -> bytes:
        return b"".join(number.to_bytes(3, "little") for number in numbers)

    still = saved(Image.new("RGB", (16, 16)), "WEBP", lossless=True)[12:]
    parts = part(b"VP8X", b"\2\0\0\0" + u24(canvas[0] - 1, canvas[1] - 1))
    parts += part(b"ANIM", bytes(6))
    parts += part(b"ANMF", u24(0, 0, 15, 15, 1) + b"\0" + still) * num_frames
    return part(b"RIFF", b"WEBP" + parts)


def gif(num_frames: int) -> bytes:
    whole = saved(Image.new("P", (4, 4)), "GIF")
    start = whole.index(b"\x2c")
    return whole[:start] + whole[start:-1] * num_frames + b";"


def tiff(num_pages: int) -> bytes:
    pages = [Image.new("L", (8, 8), i) for i in range(num_pages)]
    return saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])


def compressed_chunk(kind: bytes, before: bytes) -> bytes:
    return png(4, 4, extra=chunk(kind, before + zlib.compress(bytes(50_000_000))))


BOMBS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "13k x 13k, complete": (
        lambda: png(13_000, 13_000, pixels=bytes(13_000 * 13_001)),
        "media_too_large",
        "13000 x 13000",
    ),
    "40k x 40k": (lambda: png(40_000, 40_000), "media_too_large", "40000 x 40000"),
    "1 x 2^31-1": (lambda: png(1, 2**31 - 1), "media_too_large", "1 x 2147483647"),
    "2^31-1 x 1": (lambda: png(2**31 - 1, 1), "media_too_large", "2147483647 x 1"),
    "no width": (lambda: png(0, 7), "invalid_media", ""),
    "2^31 x 2^31": (lambda: png(2**31, 2**31), "media_too_large", ""),
    "PNG of 20,000 frames": (lambda: animated_png(20_000), "invalid_media", "animated"),
    "WEBP of 50,000 frames": (lambda: webp((16, 16), 50_000), "invalid_media", "animated"),
    "WEBP with a large canvas": (lambda: webp((16_383,) * 2, 2), "invalid_media", "animated"),
    "WEBP with a canvas at the limit": (lambda: webp((8000, 4000), 2), "invalid_media", "animated"),
    "GIF of 10^5 frames": (lambda: gif(100_000), "invalid_media", "animated"),
    "TIFF of 500 pages": (lambda: tiff(500), "invalid_media", "TIFF"),
    "compressed text": (lambda: compressed_chunk(b"zTXt", b"k\0\0"), "ok", ""),
    "compressed text of a language": (
        lambda: compressed_chunk(b"iTXt", b"k\0\1\0\0\0"),
        "ok",
        "",
    ),
    "a compressed colour profile": (
        lambda: compressed_chunk(b"iCCP", b"k\0\0"),
        "ok",
        "",
    ),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Error and memory growth of a new process for each bomb."""
    folder = tmp_path_factory.mktemp("bombs")
    files = []
    for i, (make, _, _) in enumerate(BOMBS.values()):
        files.append(folder / str(i))
        files[-1].write_bytes(make())
    command = [sys.executable, "-m", "tests.renderer.media.decode_peak", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(BOMBS, lines, strict=True))


@pytest.mark.parametrize("name", BOMBS)
def test_no_bomb_makes_the_process_grow(reports: dict[str, dict[str, Any]], name: str) -> None:
    _, code, part = BOMBS[name]
    assert reports[name]["code"] == code
    assert part in reports[name]["message"]
    assert reports[name]["growth_kib"] < 16 * 1024


def jpeg_of_many_scans(num_scans: int, size: tuple[int, int] = (64, 64)) -> bytes:
    data = saved(Image.new("RGB", size, "teal"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * (num_scans - data.count(b"\xff\xda") + 1) + data[-2:]


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    """Each of 31 bytes is a walk over all pixels: 32 MiB of them would take hours."""
    decode_image(jpeg_of_many_scans(MAX_SCANS), LIMITS, FIELD)
    for num_scans in (MAX_SCANS + 1, 100_000):
        with pytest.raises(InvalidMedia, match=f"more than {MAX_SCANS} scans"):
            decode_image(jpeg_of_many_scans(num_scans), LIMITS, FIELD)


def test_a_film_after_a_jpeg_does_not_count_as_scans() -> None:
    """Telephones append some megabytes of it."""
    film = np.random.default_rng(1).integers(0, 256, 16 * 2**20, dtype=np.uint8).tobytes()
    assert film.count(b"\xff\xda") > MAX_SCANS
    data = saved(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    assert decode_image(data + film, LIMITS, FIELD).image.size == (64, 64)


# -- S17: the other readers of Pillow -------------------------------------------------------------

MAGIC = {
    "AVIF": b"\0\0\0\x20ftypavif",
    "BLP": b"BLP2",
    "BMP": b"BM",
    "BUFR": b"BUFR",
    "CUR": b"\0\0\2\0",
    "DCX": b"\xb1\x68\xde\x3a",
    "DDS": b"DDS ",
    "DIB": b"\x28\0\0\0",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0",
    "FITS": b"SIMPLE  =                    T",
    "FLI": b"\0\0\0\0\x11\xaf\0\0\0\0\0\0\0\0\0\0",
    "FTEX": b"FTEX",
    "GBR": b"\0\0\0\x1c\0\0\0\2",
    "GRIB": b"GRIB\0\0\0\1",
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "ICNS": b"icns",
    "ICO": b"\0\0\1\0",
    "IM": b"Image type: L image\r\n",
    "IMT": b"width 8\nheight 8\n\x0c",
    "IPTC": b"\x1c\3\x0a\0\2",
    "JPEG2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "MCIDAS": b"\0\0\0\0\0\0\0\4",
    "MPEG": b"\0\0\1\xb3",
    "MSP": b"DanM",
    "PCD": bytes(2048) + b"PCD_",
    "PCX": b"\x0a\5\1\x08",
    "PIXAR": b"\x80\xe8\0\0",
    "PPM": b"P6\n8 8\n255\n",
    "PSD": b"8BPS\0\1",
    "QOI": b"qoif",
    "SGI": b"\x01\xda",
    "SPIDER": struct.pack(">27f", *[1.0] * 27),
    "SUN": b"\x59\xa6\x6a\x95",
    "TGA": b"\0\0\2\0\0\0\0\0\0\0\0\0\x08\0\x08\0\x18\0",
    "TIFF": b"II*\0",
    "WMF": b"\xd7\xcd\xc6\x9a\0\0",
    "XBM": b"#define x_width 8\n#define x_height 8\n",
    "XPM": b"/* XPM */",
    "XVTHUMB": b"P7 332",
}
NAMES = {"EPS": "PostScript", "FITS": "FITS", "PSD": "Photoshop", "ICNS": "ICNS", "TIFF": "TIFF"}


@pytest.fixture
def tried_readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of Pillow's readers were tried."""
    Image.init()
    tried: list[str] = []
    for fmt, (reader, accepts) in Image.OPEN.items():

        def try_it(
            *args: object, fmt: str = fmt, reader: Callable[..., Any] = reader
        ) -> Image.Image:
            tried.append(fmt)
            opened: Image.Image = reader(*args)
            return opened

        monkeypatch.setitem(Image.OPEN, fmt, (try_it, accepts))
    return tried


def test_the_list_of_other_formats_matches_pillow() -> None:
    Image.init()
    assert set(Image.OPEN) == set(MAGIC) | {"JPEG", "PNG", "WEBP", "GIF"}
    for fmt, magic in MAGIC.items():
        accepts = Image.OPEN[fmt][1]
        if accepts is not None and fmt != "AVIF":  # which may have been built without its library
            assert accepts(magic + bytes(16)) is True, fmt


@pytest.mark.parametrize("fmt", MAGIC)
def test_no_other_reader_of_pillow_is_tried(tried_readers: list[str], fmt: str) -> None:
    for data in (MAGIC[fmt], MAGIC[fmt] + bytes(4096), MAGIC[fmt] + b"\xff" * 4096):
        with pytest.raises(InvalidMedia) as caught:
            decode_image(data, LIMITS, FIELD)
        assert NAMES.get(fmt, "JPEG, PNG or WEBP") in caught.value.message
    assert set(tried_readers) <= {"JPEG", "PNG", "WEBP"}


# -- S19: images of strange sizes, all the way ---------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> tuple[Processor, EngineCore]:
    model = ModelConfig(str(DEMO_MODEL))
    return Processor(model), build_core(load(model, EngineConfig()), EngineConfig())


SIZES = [(1, 1), (27, 27), (28, 28), (29, 29), (28, 27), (2, 3)]
SIZES += [(1, 7), (7, 1), (1, 200), (200, 1), (1, 201), (201, 1), (14, 2800), (2800, 14), (3, 600)]
SIZES += [(16_384, 82), (81, 16_384)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_image_of_any_size_is_answered_or_refused(
    demo: tuple[Processor, EngineCore], size: tuple[int, int]
) -> None:
    processor, core = demo
    parts: list[ContentPart] = [
        ImagePart(ImageURL("data:,")),
        TextPart("What color is this image?"),
    ]
    image = decode_image(saved(Image.new("RGB", size, "red"), "PNG"), LIMITS, FIELD)
    if max(size) > 200 * min(size):
        with pytest.raises(InvalidMedia, match="more than 200 times"):
            render(processor, [Message("user", parts)], [image])
        return
    rendered = render(processor, [Message("user", parts)], [image])
    answers, errors = run(core, [unpack(pack(rendered))])
    assert (len(answers["r"]) > 0, errors) == (True, {})


# -- S31: text that would be an image's place -----------------------------------------------------

LOOKALIKES = [
    "\uff1c|image_pad|\uff1e",
    "<|image\u200b_pad|>",
    "<\u200d|image_pad|>",
    "<|IMAGE_PAD|>",
]


def test_no_control_token_of_the_demo_model_can_be_typed(
    demo: tuple[Processor, EngineCore],
) -> None:
    processor, _ = demo
    image = DecodedImage(Image.new("RGB", (56, 56), "red"), "hash")
    picture = ImagePart(ImageURL("data:,"))
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    added = tokenizer.added_tokens_decoder.values()
    tokens = [token.content for token in added if token.special]
    assert "<|image_pad|>" in tokens
    for token in tokens:
        around: list[list[ContentPart]] = [
            [TextPart(token), picture],
            [picture, TextPart(f"a{token}b")],
        ]
        for parts in around:
            with pytest.raises(InvalidRequest, match="control token"):
                render(processor, [Message("user", parts)], [image])
        for cut in range(1, len(token)):
            halves: list[ContentPart] = [TextPart(token[:cut]), TextPart(token[cut:])]
            with pytest.raises(InvalidRequest, match="control token"):
                render(processor, [Message("user", [*halves, picture])], [image])


@pytest.mark.parametrize("text", LOOKALIKES, ids=ascii)
def test_lookalikes_leave_the_image_where_it_is(
    demo: tuple[Processor, EngineCore], text: str
) -> None:
    processor, core = demo
    image = DecodedImage(Image.new("RGB", (56, 56), "red"), "hash")
    parts: list[ContentPart] = [ImagePart(ImageURL("data:,")), TextPart(text)]
    rendered = render(processor, [Message("user", parts)], [image])
    plain = render(processor, [Message("user", [parts[0], TextPart("x")])], [image])
    assert [i.placeholder for i in rendered.items] == [i.placeholder for i in plain.items]
    pad = processor.placeholder_ids[IMAGE]
    assert rendered.prompt_token_ids.count(pad) == plain.prompt_token_ids.count(pad)
    _, errors = run(core, [unpack(pack(rendered))])
    assert errors == {}
