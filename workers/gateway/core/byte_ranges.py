"""Byte ranges of bodies that may still grow. Pure."""

import re

from msgspec import Struct

from workers.gateway.http.errors import RangeNotSatisfiable

# RFC 8673: stands for the last position while the length of the body is not known.
OPEN_END = 2**53 - 1

_RANGE = re.compile(r"bytes=(\d{1,16})?-(\d{1,16})?", re.ASCII)


class ByteRange(Struct, frozen=True):
    """A part of a body; `total` is None while the body grows."""

    first: int
    last: int
    total: int | None

    @property
    def num_bytes(self) -> int | None:
        """The length of the part; None where the body may end before it."""
        return None if self.total is None else self.last + 1 - self.first

    @property
    def header(self) -> str:
        """The value of Content-Range."""
        return f"bytes {self.first}-{self.last}/{'*' if self.total is None else self.total}"


def read_range(header: str, total: int | None) -> ByteRange | None:
    """Return the part that a Range header requests; None for the whole body.

    A header that is not a single range of bytes is ignored, and so is a range from the end of a
    body that grows. Raises RangeNotSatisfiable.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[0] == "bytes=-":
        return None
    end = OPEN_END if total is None else total - 1
    if match[1] is None:
        if total is None:
            return None
        first, last = max(0, total - int(match[2])), end
    else:
        first, last = int(match[1]), end if match[2] is None else min(end, int(match[2]))
        if match[2] is not None and int(match[2]) < first:
            return None
    if total is not None and first >= total:
        raise range_error(first, total)
    return ByteRange(first, last, total)


def range_error(first: int, total: int) -> RangeNotSatisfiable:
    return RangeNotSatisfiable(
        f"Range: byte {first} is after the end, the body has {total} bytes", total
    )


def cut(piece: bytes, offset: int, part: ByteRange) -> bytes:
    """Return the bytes of a piece, which begins at `offset`, that are in the part."""
    return piece[max(0, part.first - offset) : max(0, part.last + 1 - offset)]
