"""Byte ranges against a slice of the whole body."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.gateway.core.byte_ranges import OPEN_END, ByteRange, cut, read_range
from workers.gateway.http.errors import RangeNotSatisfiable


@given(st.binary(min_size=1, max_size=40), st.integers(0, 50), st.integers(0, 50), st.data())
def test_a_range_is_a_slice_however_the_body_is_cut(
    body: bytes, first: int, last: int, data: st.DataObject
) -> None:
    header = f"bytes={first}-{last}"
    if last < first:
        assert read_range(header, len(body)) is None
        return
    if first >= len(body):
        with pytest.raises(RangeNotSatisfiable, match=f"{first} is after the end.*{len(body)}"):
            read_range(header, len(body))
        return
    part = read_range(header, len(body))
    assert part is not None
    piece = body[first : last + 1]
    assert (part.num_bytes, part.header) == (
        len(piece),
        f"bytes {first}-{first + len(piece) - 1}/{len(body)}",
    )
    at = data.draw(st.integers(0, len(body)))
    assert cut(body[:at], 0, part) + cut(body[at:], at, part) == piece


@given(st.integers(1, 40), st.integers(0, 50))
def test_a_range_from_the_end(size: int, count: int) -> None:
    header = f"bytes=-{count}"
    if count == 0:
        with pytest.raises(RangeNotSatisfiable):
            read_range(header, size)
    else:
        assert read_range(header, size) == ByteRange(max(0, size - count), size - 1, size)
    assert read_range(header, None) is None


def test_a_body_that_grows_has_an_open_end() -> None:
    part = read_range("bytes=7-", None)
    assert part == ByteRange(7, OPEN_END, None)
    assert (part.num_bytes, part.header) == (None, f"bytes 7-{OPEN_END}/*")
    assert cut(b"0123456789", 5, part) == b"23456789"


@pytest.mark.parametrize(
    "header", ["", "bytes=-", "bytes=1-2,4-5", "items=0-1", "bytes=a-b", f"bytes={'9' * 17}-"]
)
def test_other_headers_are_ignored(header: str) -> None:
    assert read_range(header, 10) is None
