"""PDF documents, by PDFium: images of their pages, and the text of pages.

PDFium is built without JavaScript and XFA. Inside of the sandbox it finds no fonts of the machine,
so pages look the same on all machines.
"""

import codecs
import math
import unicodedata
from collections.abc import Iterator, Sequence

import pypdfium2 as pdfium

from shared.decoding.refusal import Refusal
from workers.renderer.decoding.containers import Bytes
from workers.renderer.decoding.messages import DecodingLimits, DocumentProbe
from workers.renderer.decoding.video_file import Pixels

HEAD = b"%PDF-"
HEAD_BYTES = 1024
"""Number of first bytes in which readers of PDF search for the head."""
POINTS_PER_INCH = 72
PRELOADED = codecs.lookup("utf-16-le")
"""Codec of PDFium's texts. Python would import it at its first use, which the sandbox refuses."""
_IGNORED_CATEGORIES = frozenset({"Cc", "Cn", "Cs"})
"""Categories of characters without a glyph. PDFium marks hyphens at line ends with some of them."""


class DocumentFile:
    """A PDF document that can be opened without a password. Every error is a Refusal."""

    def __init__(self, data: Bytes, limits: DecodingLimits) -> None:
        if HEAD not in data[:HEAD_BYTES]:
            raise Refusal("invalid", "not a PDF document; send images as image_url")
        self._limits = limits
        try:
            self._document = pdfium.PdfDocument(data[:])
        except pdfium.PdfiumError as error:
            if error.err_code == pdfium.raw.FPDF_ERR_PASSWORD:
                raise Refusal("invalid", "the document is encrypted with a password") from None
            raise Refusal("invalid", "the document is damaged or incomplete") from None
        # Without it, the contents of form fields are not drawn.
        self._document.init_forms()
        num_pages = len(self._document)
        if num_pages < 1:
            raise Refusal("invalid", "the document has no pages")
        self.probe = DocumentProbe(num_pages)

    def images(self, numbers: Sequence[int], dpi: int) -> Iterator[Pixels]:
        """Yield an image of each page, counted from 1."""
        scale = dpi / POINTS_PER_INCH
        for number in numbers:
            page = self._open_page(number)
            width, height = (max(1, math.ceil(side * scale)) for side in page.get_size())
            self._check_size(number, width, height, dpi)
            yield page.render(scale=scale, rev_byteorder=True).to_numpy()
            page.close()

    def texts(self, numbers: Sequence[int]) -> Iterator[str]:
        """Yield the text of each page and a line break, so that no text is empty."""
        for number in numbers:
            page = self._open_page(number)
            try:
                text = page.get_textpage().get_text_bounded()
            except pdfium.PdfiumError:
                raise _damaged(number) from None
            yield "".join(filter(_is_shown, text.replace("\r\n", "\n"))) + "\n"
            page.close()

    def _open_page(self, number: int) -> pdfium.PdfPage:
        try:
            return self._document[number - 1]
        except pdfium.PdfiumError:
            raise _damaged(number) from None

    def _check_size(self, number: int, width: int, height: int, dpi: int) -> None:
        page = f"page {number} of the document has {width} x {height} pixels at {dpi} dpi"
        if max(width, height) > self._limits.max_side:
            raise Refusal(
                "too_large",
                f"{page}, over the limit of {self._limits.max_side} a side; send a lower dpi",
            )
        if width * height > self._limits.max_page_pixels:
            raise Refusal(
                "too_large",
                f"{page}, over the limit of {self._limits.max_page_pixels}; send a lower dpi",
            )


def _is_shown(character: str) -> bool:
    return character in "\n\t" or unicodedata.category(character) not in _IGNORED_CATEGORIES


def _damaged(number: int) -> Refusal:
    return Refusal("invalid", f"page {number} of the document is damaged")
