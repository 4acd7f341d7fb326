"""PDF documents that refer to themselves, to other files, or to very large contents."""

import zlib
from collections.abc import Callable

from tests.support.documents import assemble, document, letters, stream

SIZE = (300, 300)
FILL = b"0 0 300 300 re f"
DRAW = b"300 0 0 300 0 0 cm /X Do"
FORM = b"/Type /XObject /Subtype /Form /BBox [0 0 300 300] "


def page_with(resources: bytes, content: bytes, *further: bytes) -> bytes:
    """Return a page with these resources. The `further` objects are numbered from 4 on."""
    entry = b"/Resources << %s >>" % resources
    return document([stream(content)], SIZE, page=entry, further=further)


def page(content: bytes, *, packed: int = 0, entries: bytes = b"") -> bytes:
    return document([stream(content, packed=packed)], SIZE, page=entries)


def image(entries: bytes, content: bytes = bytes(1000)) -> bytes:
    """Return a page with an image that claims to have 60,000 pixels on each side."""
    size = b"/Type /XObject /Subtype /Image /Width 60000 /Height 60000 /BitsPerComponent 1 "
    return page_with(b"/XObject << /X 4 0 R >>", DRAW, stream(content, size + entries))


def looping_tables() -> bytes:
    """Return a document with a table of its objects that names itself as the table before."""
    data = letters("A")
    place = int(data.rpartition(b"startxref\n")[2].split()[0])
    return data.replace(b" >>\nstartxref", b" /Prev %d >>\nstartxref" % place)


def looping_pattern() -> bytes:
    entries = b"/Type /Pattern /PatternType 1 /PaintType 1 /TilingType 1 /BBox [0 0 9 9] /XStep 9"
    entries += b" /YStep 9 /Resources << /Pattern << /P 4 0 R >> >>"
    paint = b"/Pattern cs /P scn " + FILL
    return page_with(b"/Pattern << /P 4 0 R >>", paint, stream(paint, entries))


def looping_mask() -> bytes:
    state = b"<< /Type /ExtGState /SMask << /S /Luminosity /G 5 0 R >> >>"
    resources = b"/ExtGState << /G 4 0 R >>"
    entries = FORM + b"/Group << /S /Transparency >> /Resources << %s >>" % resources
    return page_with(resources, b"/G gs " + FILL, state, stream(b"/G gs " + FILL, entries))


def looping_glyph() -> bytes:
    """Return a page with a font whose only glyph shows itself twice."""
    glyph = stream(b"1000 0 0 0 750 750 d1 BT /T 1 Tf (aa) Tj ET 0 0 750 750 re f")
    font = (
        b"<< /Type /Font /Subtype /Type3 /FontBBox [0 0 750 750] /FontMatrix [.001 0 0 .001 0 0]"
        b" /CharProcs << /a 4 0 R >> /Encoding << /Type /Encoding /Differences [97 /a] >>"
        b" /FirstChar 97 /LastChar 97 /Widths [1000] /Resources << /Font << /T 5 0 R >> >> >>"
    )
    return page_with(b"/Font << /T 5 0 R >>", b"BT /T 100 Tf (aaaa) Tj ET", glyph, font)


def looping_function() -> bytes:
    shading = b"<< /ShadingType 2 /ColorSpace /DeviceRGB /Coords [0 0 300 300] /Function 5 0 R >>"
    function = b"<< /FunctionType 3 /Domain [0 1] /Functions [5 0 R 5 0 R] /Bounds [0.5]"
    function += b" /Encode [0 1 0 1] >>"
    return page_with(b"/Shading << /S 4 0 R >>", b"/S sh", shading, function)


def looping_colours() -> bytes:
    colours = b"[/Indexed 4 0 R 1 <000000ffffff>]"
    return page_with(b"/ColorSpace << /C 4 0 R >>", b"/C cs 0 sc " + FILL, colours)


def looping_fields() -> bytes:
    field = b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (n) /Kids [4 0 R 4 0 R] /Parent 4 0 R"
    field += b" /Rect [0 0 300 300] >>"
    form = b"/AcroForm << /Fields [4 0 R] >>"
    return document([stream(b"")], SIZE, page=b"/Annots [4 0 R]", catalog=form, further=[field])


def looping_outlines() -> bytes:
    outlines = b"<< /First 4 0 R /Next 4 0 R /Last 4 0 R /Title (x) >>"
    return document([stream(b"")], SIZE, catalog=b"/Outlines 4 0 R", further=[outlines])


def acting() -> bytes:
    """Return a document that starts a program and opens a URL when it is opened or closed."""
    actions = b"/OpenAction << /S /Launch /F (/bin/sh) >>"
    actions += b" /AA << /WC << /S /URI /URI (http://127.0.0.1:9/) >> >>"
    return document([stream(FILL)], SIZE, catalog=actions)


def outside() -> bytes:
    """Return a page with content in another file."""
    content = b"<< /Length 0 /F (/etc/passwd) /FFilter /None >>\nstream\n\nendstream"
    return document([content], SIZE)


def packed_objects() -> bytes:
    """Return a document with a gigabyte of packed objects in a megabyte."""
    packer = zlib.compressobj()
    packed = b"".join(packer.compress(b" " * 2**20) for _ in range(1024)) + packer.flush()
    objects = stream(packed, b"/Type /ObjStm /N 1 /First 9 /Filter /FlateDecode")
    return page_with(b"/X 5 0 R", b"0 g", objects)


def mesh() -> bytes:
    entries = b"/ShadingType 4 /ColorSpace /DeviceRGB /BitsPerCoordinate 8 /BitsPerComponent 8"
    entries += b" /BitsPerFlag 8 /Decode [0 300 0 300 0 1 0 1 0 1]"
    return page_with(b"/Shading << /S 4 0 R >>", b"/S sh", stream(bytes(2**24), entries, packed=1))


def deep_pages(depth: int = 20_000) -> bytes:
    """Return a document with a page below many levels of the tree of pages."""
    levels = [b"<< /Type /Pages /Count 1 /Kids [%d 0 R] >>" % (3 + i) for i in range(depth)]
    leaf = b"<< /Type /Page /Parent %d 0 R >>" % (depth + 1)
    return assemble([b"<< /Type /Catalog /Pages 2 0 R >>", *levels, leaf])


HARMLESS: dict[str, Callable[[], bytes]] = {
    "looping tables": looping_tables,
    "looping patterns": looping_pattern,
    "looping masks": looping_mask,
    "looping glyphs": looping_glyph,
    "looping functions": looping_function,
    "looping colours": looping_colours,
    "looping fields": looping_fields,
    "looping outlines": looping_outlines,
    "actions": acting,
    "another file": outside,
    "packed objects": packed_objects,
    "a large mesh": mesh,
    "deep arrays": lambda: page_with(b"/X " + b"[" * 200_000 + b"]" * 200_000, b"0 g"),
    "deep content": lambda: page(b"[" * 1_000_000, packed=1),
    "saved states": lambda: page(b"q " * 100_000, packed=1),
    "tiny dashes": lambda: page(b"[0.000001] 0 d 1 w 0 0 m 300 300 l S"),
    "far lines": lambda: page(b"[0.001] 0 d 1 w 0 0 m 1e9 1e9 l S"),
    "an image in the content": lambda: page(
        b"300 0 0 300 0 0 cm BI /W 60000 /H 60000 /BPC 8 /CS /RGB ID %s EI" % bytes(1000)
    ),
    "JPEG 2000": lambda: image(b"/Filter /JPXDecode", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100)),
    "JBIG2": lambda: image(b"/ColorSpace /DeviceGray /Filter /JBIG2Decode"),
    "a large unit": lambda: page(FILL, entries=b"/UserUnit 1000000"),
    "a negative page": lambda: page(FILL, entries=b"/MediaBox [0 0 -300 -300]"),
    "a large crop": lambda: page(FILL, entries=b"/CropBox [0 0 1e9 1e9]"),
}
"""Documents of one page that cost no more than others."""
COSTLY: dict[str, Callable[[], bytes]] = {
    "a large fax": lambda: image(
        b"/ColorSpace /DeviceGray /Filter /CCITTFaxDecode"
        b" /DecodeParms << /K -1 /Columns 60000 /Rows 60000 >>"
    ),
}
