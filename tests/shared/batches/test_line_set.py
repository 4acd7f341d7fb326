"""Sets of lines as ranges."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.batches.line_set import LineSet

LINES = st.lists(st.integers(1, 40), unique=True)


@given(LINES)
def test_a_set_has_the_lines_that_were_added_in_any_order(lines: list[int]) -> None:
    found = LineSet()
    for line in lines:
        assert line not in found
        found.update([line])
        assert line in found
    assert found.last == max(lines, default=0)
    together = LineSet()
    together.update(lines)
    assert together.ranges == found.ranges
    assert len(found) == len(lines)
    assert [line for line in range(50) if line in found] == sorted(lines)
    assert found.first_missing == min(set(range(1, 50)) - set(lines))
    # Ranges are as few as possible, and make the same set again.
    gaps = sum(line + 1 not in lines for line in lines)
    assert len(found.ranges) == gaps
    assert LineSet(found.ranges).ranges == found.ranges
    assert LineSet.unpack(found.packed).ranges == found.ranges


def test_a_packed_set_is_small_whatever_is_missing() -> None:
    rng = random.Random(0)
    every_other = [(line, line + 1) for line in range(1, 4096, 2)]
    any_order = LineSet()
    any_order.update(rng.sample(range(1, 4096), 2048))
    all_but_one = LineSet([(1, 2), (3, 10**6)])
    for lines in (LineSet(every_other), any_order, all_but_one):
        assert len(lines.packed) < 1024
        assert LineSet.unpack(lines.packed).ranges == lines.ranges


@pytest.mark.parametrize("data", [b"x", zlib.compress(b"\xff"), zlib.compress(b"\x92\x02\x00")])
def test_other_bytes_are_not_a_set(data: bytes) -> None:
    with pytest.raises(ValueError, match="not"):
        LineSet.unpack(data)


def test_a_line_is_added_once() -> None:
    lines = LineSet([(1, 3), (5, 6)])
    for added in ([0], [1], [2], [5], [4, 5], [3, 4, 5], [8, 8]):
        with pytest.raises(ValueError, match="twice"):
            lines.update(added)


@pytest.mark.parametrize("ranges", [[(0, 2)], [(2, 2)], [(1, 3), (3, 4)], [(4, 5), (1, 2)]])
def test_other_ranges_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        LineSet(ranges)
