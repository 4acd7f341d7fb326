"""PDF documents for tests: a small writer, and files of other programs."""

import io
import zlib
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas

A4 = (595, 842)
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"


def assemble(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Return a file with these objects, numbered from 1. The first one is the catalog."""
    file = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    file += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    entries = b"/Size %d /Root 1 0 R %s" % (len(objects) + 1, trailer)
    return bytes(file + b"trailer << %s >>\nstartxref\n%d\n%%%%EOF\n" % (entries, start))


def stream(content: bytes, entries: bytes = b"", *, packed: int = 0) -> bytes:
    """Return a stream, compressed `packed` times."""
    filters = b"/Filter [%s]" % b" ".join([b"/FlateDecode"] * packed)
    for _ in range(packed):
        content = zlib.compress(content, 9)
    head = b"<< /Length %d %s %s >>" % (len(content), filters, entries)
    return head + b"\nstream\n" + content + b"\nendstream"


def document(
    contents: Sequence[bytes],
    size: tuple[float, float] = A4,
    *,
    page: bytes = b"",
    catalog: bytes = b"",
    further: Sequence[bytes] = (),
) -> bytes:
    """Return a document with a page for each content, an object such as a stream.

    The font F is Helvetica. `page` and `catalog` are further entries of these objects. The
    `further` objects are numbered from 4 on, and the first page follows them.
    """
    first = 4 + len(further)
    kids = b" ".join(b"%d 0 R" % (first + 2 * i) for i in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R %s >>" % catalog,
        b"<< /Type /Pages /Count %d /Kids [%s] /MediaBox [0 0 %g %g] >>"
        % (len(contents), kids, *size),
        FONT,
        *further,
    ]
    resources = b"" if b"/Resources" in page else b"/Resources << /Font << /F 3 0 R >> >>"
    for i, content in enumerate(contents):
        place = first + 2 * i + 1
        entries = b"/Parent 2 0 R /Contents %d 0 R %s %s" % (place, resources, page)
        objects += [b"<< /Type /Page %s >>" % entries, content]
    return assemble(objects)


def letters(texts: str, size: tuple[float, float] = (300, 300)) -> bytes:
    """Return a document with one large letter on each page, as text."""
    width, height = size
    show = b"BT /F %g Tf %g %g Td (%s) Tj ET"
    return document(
        [
            stream(show % (0.8 * height, 0.2 * width, 0.2 * height, text.encode()), packed=1)
            for text in texts
        ],
        size,
    )


def scans(texts: str) -> bytes:
    """Return a document of Pillow with one large letter on each page, as an image."""
    pages = []
    for text in texts:
        page = Image.new("RGB", (300, 300), "white")
        font = ImageFont.load_default(240)
        ImageDraw.Draw(page).text((150, 150), text, "black", font, anchor="mm")
        pages.append(page)
    file = io.BytesIO()
    pages[0].save(file, "PDF", save_all=True, append_images=pages[1:], resolution=72)
    return file.getvalue()


def reported(texts: str, user: str | None = None) -> bytes:
    """Return a document of reportlab with one large letter on each page, as text.

    With `user`, it is encrypted with this password, which may be empty.
    """
    file = io.BytesIO()
    lock = None if user is None else StandardEncryption(user, ownerPassword="owner", strength=128)
    canvas = Canvas(file, pagesize=(300, 300), encrypt=lock)
    for text in texts:
        canvas.setFont("Helvetica", 240)
        canvas.drawCentredString(150, 60, text)
        canvas.showPage()
    canvas.save()
    return file.getvalue()
