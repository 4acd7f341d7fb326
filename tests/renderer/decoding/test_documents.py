"""Documents in decoders: pages as images, their text, and files that are meant to harm."""

import functools
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from pypdfium2.version import PDFIUM_INFO

from shared.errors import InvalidMedia, MediaTooLarge, RequestError
from tests.renderer.decoding.reading import FIELD, LIMITS, Reader
from tests.renderer.decoding.test_attacks import MAX_CPU_S, MAX_GROWTH_KIB, children_cpu_s, peak_kib
from tests.support import hostile_documents as hostile
from tests.support.documents import A4, assemble, document, letters, reported, scans, stream
from tests.support.media import png
from workers.renderer.decoding.pool import DecoderPool

BLACK = b"0 0 0 rg 0 0 1000 1000 re f"


def test_a_page_is_an_image_of_its_size(reader: Reader) -> None:
    data = document([stream(b"1 0 0 rg 0 421 595 421 re f")], A4)
    num_pages, (image,) = reader.pages(data, [1], dpi=72)
    assert (num_pages, image.shape) == (1, (842, 595, 3))
    assert image[:420].reshape(-1, 3).min(axis=0).tolist() == [255, 0, 0]
    assert image[:420].reshape(-1, 3).max(axis=0).tolist() == [255, 0, 0]
    assert image[422:].min() == 255
    _, (larger,) = reader.pages(data, [1], dpi=144)
    assert larger.shape == (1684, 1190, 3)


def test_pages_are_read_in_the_order_of_the_request(reader: Reader) -> None:
    data = document([stream(b"%g g 0 0 300 300 re f" % (i / 4)) for i in range(4)], (300, 300))
    num_pages, images = reader.pages(data, [3, 1, 3])
    assert num_pages == 4
    assert [round(float(image.mean()) / 255 * 4) for image in images] == [2, 0, 2]


def test_a_page_may_be_turned(reader: Reader) -> None:
    data = document([stream(b"0 g 0 0 595 421 re f")], A4, page=b"/Rotate 90")
    _, (image,) = reader.pages(data, [1], dpi=72)
    assert image.shape == (595, 842, 3)
    assert (image[:, :420].max(), image[:, 422:].min()) == (0, 255)


def test_the_contents_of_form_fields_are_drawn(reader: Reader) -> None:
    further = [
        b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (name) /V (x) /Rect [0 0 300 300] /F 4"
        b" /AP << /N 5 0 R >> >>",
        stream(BLACK, b"/Type /XObject /Subtype /Form /BBox [0 0 300 300]"),
    ]
    data = document(
        [stream(b"")],
        (300, 300),
        page=b"/Annots [4 0 R]",
        catalog=b"/AcroForm << /Fields [4 0 R] >>",
        further=further,
    )
    _, (image,) = reader.pages(data, [1])
    # The form's fields are marked by a colour in viewers, and not here.
    assert image.max() == 0


def test_the_text_of_pages(reader: Reader) -> None:
    lines = b"BT /F 12 Tf 20 200 Td (One \\(1\\)) Tj 0 -20 Td (caf\\351 two) Tj ET"
    data = document([stream(lines), stream(b"")], (300, 300))
    assert reader.texts(data, [1, 2]) == ["One (1)\ncafé two\n", "\n"]


@pytest.mark.parametrize("make", [letters, scans, reported])
def test_files_of_several_programs(reader: Reader, make: Callable[[str], bytes]) -> None:
    num_pages, images = reader.pages(make("AB"), [1, 2], dpi=72)
    assert (num_pages, [image.shape for image in images]) == (2, [(300, 300, 3)] * 2)
    dark = [float((image < 128).mean()) for image in images]
    assert all(0.03 < part < 0.5 for part in dark), dark


def looping_pages() -> bytes:
    return assemble(
        [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 9 /Kids [2 0 R 2 0 R] >>"]
    )


def many_pages(num_pages: int = 10_000) -> bytes:
    kids = b" ".join([b"3 0 R"] * num_pages)
    return assemble(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Count %d /Kids [%s] >>" % (num_pages, kids),
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] >>",
        ]
    )


def looping_forms() -> bytes:
    """Return a page with a form that draws itself twice."""
    resources = b"/Resources << /XObject << /X 4 0 R >> >>"
    form = stream(b"/X Do /X Do", b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] " + resources)
    return document([stream(b"/X Do")], page=resources, further=[form])


def looping_lengths() -> bytes:
    """Return a document with a stream whose length is its own content."""
    return document([b"<< /Length 5 0 R >>\nstream\n0 g\nendstream"])


def encrypted() -> bytes:
    """Return a document whose password is not empty, by its own account."""
    data = document([stream(BLACK)])
    entry = (
        b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >> /ID [<00> <00>] >>"
        % (b"11" * 32, b"22" * 32)
    )
    return data.replace(b" >>\nstartxref", entry + b"\nstartxref")


def scripted() -> bytes:
    script = b"/OpenAction << /S /JavaScript /JS (app.alert\\(1\\); while \\(true\\) {}) >>"
    return document([stream(BLACK)], (300, 300), catalog=script)


def many_lines() -> bytes:
    """Return a page of 16 MiB of lines in 40 KiB."""
    line = b"0 0 m 300 300 l S\n"
    return document([stream(line * (2**24 // len(line)), packed=1)], (300, 300))


def blanks() -> bytes:
    """Return a page of a gigabyte of blanks in 3 KiB."""
    packer = zlib.compressobj(wbits=-15)
    # After a full flush, the same bytes stand for the next MiB as well.
    piece = packer.compress(b" " * 2**20) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = functools.reduce(lambda sum, _: zlib.adler32(b" " * 2**20, sum), range(1024), 1)
    packed = b"\x78\x9c" + piece * 1024 + packer.flush() + checksum.to_bytes(4, "big")
    return document([stream(zlib.compress(packed), b"/Filter [/FlateDecode /FlateDecode]")])


def huge_image(side: int = 60_000) -> bytes:
    entries = b"/Type /XObject /Subtype /Image /Width %d /Height %d" % (side, side)
    entries += b" /BitsPerComponent 8 /ColorSpace /DeviceRGB"
    image = stream(bytes(2**24), entries, packed=2)
    page = b"/Resources << /XObject << /X 4 0 R >> >>"
    return document([stream(b"300 0 0 300 0 0 cm /X Do")], (300, 300), page=page, further=[image])


def fine_pattern() -> bytes:
    """Return a page that is filled with tiles of a millionth of a point."""
    tile = stream(
        b"0 0 1 1 re f",
        b"/Type /Pattern /PatternType 1 /PaintType 1 /TilingType 1 /BBox [0 0 1 1] /XStep 1"
        b" /YStep 1 /Matrix [1e-6 0 0 1e-6 0 0] /Resources << >>",
    )
    resources = b"/Resources << /Pattern << /P 4 0 R >> >>"
    content = stream(b"/Pattern cs /P scn 0 0 300 300 re f")
    return document([content], (300, 300), page=resources, further=[tile])


INVALID: dict[str, tuple[Callable[[], bytes], type[RequestError], str]] = {
    "an image": (png, InvalidMedia, "not a PDF document; send images as image_url"),
    "nothing": (lambda: b"", InvalidMedia, "damaged or incomplete"),
    "half": (lambda: letters("AB")[:300], InvalidMedia, "damaged or incomplete"),
    "without an end": (lambda: letters("AB")[:-200], InvalidMedia, "damaged or incomplete"),
    "without pages": (lambda: document([]), InvalidMedia, "damaged or incomplete"),
    "deep pages": (hostile.deep_pages, InvalidMedia, "page 1 of the document is damaged"),
    "looping pages": (looping_pages, InvalidMedia, "page 1 of the document is damaged"),
    "encrypted": (encrypted, InvalidMedia, "encrypted with a password"),
    "huge page": (
        lambda: document([stream(b"")], (14_400, 14_400)),
        MediaTooLarge,
        "page 1 of the document has 14400 x 14400 pixels at 72 dpi, over the limit of 33554432",
    ),
    "wide page": (
        lambda: document([stream(b"")], (16_400, 100)),
        MediaTooLarge,
        "16400 x 100 pixels at 72 dpi, over the limit of 16384 a side",
    ),
}
COSTLY: dict[str, tuple[Callable[[], bytes], str]] = {
    "looping forms": (looping_forms, "1 s of processor time"),
    "many lines": (many_lines, "1 s of processor time"),
    "blanks": (blanks, "1 s of processor time|signal 6"),
    **{name: (make, "1 s of processor time") for name, make in hostile.COSTLY.items()},
}
HARMLESS: dict[str, tuple[Callable[[], bytes], int]] = {
    "ten thousand pages": (many_pages, 10_000),
    "looping lengths": (looping_lengths, 1),
    "scripts": (scripted, 1),
    "a huge image": (huge_image, 1),
    "a fine pattern": (fine_pattern, 1),
    "a false count": (lambda: letters("A").replace(b"/Count 1", b"/Count 2147483647"), 1),
    "an infinite page": (lambda: document([stream(b"")], (1e30, 1e30)), 1),
    "an empty page": (lambda: document([stream(b"")], (0, 0)), 1),
    **{name: (make, 1) for name, make in hostile.HARMLESS.items()},
}


@pytest.fixture
def cheap(reader: Reader) -> Iterator[None]:
    """Check that what a test does costs little time in decoders, and little memory here."""
    reader.pages(letters("A"), [1])
    pid = reader.pool.forks.pid
    assert pid is not None
    before_s, before_kib = children_cpu_s(pid), peak_kib()
    yield
    reader.pages(letters("A"), [1])  # Its decoder ends after the decoder of the test.
    assert children_cpu_s(pid) - before_s < MAX_CPU_S
    assert peak_kib() - before_kib < MAX_GROWTH_KIB


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_document_gets_one_error(reader: Reader, cheap: None, name: str) -> None:
    make, error, message = INVALID[name]
    with pytest.raises(error, match=message) as raised:
        reader.pages(make(), [1])
    assert raised.value.field == FIELD


@pytest.mark.parametrize("name", HARMLESS)
def test_a_strange_document_has_pages(reader: Reader, cheap: None, name: str) -> None:
    make, expected = HARMLESS[name]
    num_pages, (image,) = reader.pages(make(), [1])
    assert num_pages == expected
    assert image.size < 2**22


@pytest.fixture(scope="module")
def limited() -> Iterator[Reader]:
    pool = DecoderPool(replace(LIMITS, max_cpu_s=1), max_decoders=2)
    yield Reader(pool)
    pool.close()


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_page_ends_with_its_decoder(limited: Reader, name: str) -> None:
    """Its other pages are read, and so are other documents."""
    make, message = COSTLY[name]
    data = make()
    assert len(data) < 2**20
    for _ in range(2):
        with pytest.raises(InvalidMedia, match=f"within its limits: .*({message})") as raised:
            limited.pages(data, [1])
        assert raised.value.field == FIELD
    assert limited.pages(letters("A"), [1])[0] == 1


def test_an_encrypted_document_without_a_password_is_read(reader: Reader) -> None:
    assert reader.texts(reported("AB", user=""), [1, 2]) == ["A\n", "B\n"]
    with pytest.raises(InvalidMedia, match="encrypted with a password"):
        reader.texts(reported("AB", user="secret"), [1, 2])


def test_pdfium_has_no_engine_for_scripts() -> None:
    assert not {"V8", "XFA"} & set(PDFIUM_INFO.flags)


def test_flipped_bytes_end_no_decoder(reader: Reader, cheap: None) -> None:
    messages = []
    for seed in range(20):
        data = bytearray(scans("AB") if seed % 2 else letters("AB"))
        rng = np.random.default_rng(seed)
        for position in rng.integers(20, len(data), 20):
            data[position] ^= int(rng.integers(1, 255))
        try:
            reader.pages(bytes(data), [1])
        except RequestError as error:
            messages.append(error.message)
    assert not [message for message in messages if "signal" in message or "time" in message]
