"""Set of line numbers, as ascending ranges: its size depends on its gaps, not on its lines."""

import bisect
import zlib
from collections.abc import Iterable
from itertools import accumulate, chain, pairwise
from typing import Self

import msgspec

from shared.protocol.encoding import to_msgpack


class LineSet:
    """Set of line numbers, which count from 1."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """`ranges` are ascending and apart, each with its first line and the line after its last.

        Raises ValueError for other ranges.
        """
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            if not start < end or start <= (self._ends[-1] if self._ends else 0):
                raise ValueError("the ranges of lines are not ascending and apart")
            self._starts.append(start)
            self._ends.append(end)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the set of `packed`. Raises ValueError for other bytes."""
        try:
            steps = msgspec.msgpack.decode(zlib.decompress(data), type=list[int]) if data else []
        except (zlib.error, msgspec.DecodeError) as error:
            raise ValueError("not a set of lines") from error
        bounds = list(accumulate(steps))
        return cls(zip(bounds[::2], bounds[1::2], strict=True))

    @property
    def packed(self) -> bytes:
        """The set in few bytes, also when every other line is missing."""
        steps = [after - before for before, after in pairwise((0, *chain(*self.ranges)))]
        return zlib.compress(to_msgpack(steps), 1) if steps else b""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    @property
    def first_missing(self) -> int:
        """The smallest line that is not in the set."""
        return self._ends[0] if self._starts[:1] == [1] else 1

    @property
    def last(self) -> int:
        """The largest line in the set; 0 if it is empty."""
        return self._ends[-1] - 1 if self._ends else 0

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def __contains__(self, line: int) -> bool:
        at = bisect.bisect_right(self._starts, line) - 1
        return at >= 0 and line < self._ends[at]

    def update(self, lines: Iterable[int]) -> None:
        """Add lines. Raises ValueError for a line that is in the set, or occurs twice."""
        start = end = 0
        for line in sorted(lines):
            if line != end:
                self._add_range(start, end)
                start = line
            end = line + 1
        self._add_range(start, end)

    def _add_range(self, start: int, end: int) -> None:
        if start == end:
            return
        at = bisect.bisect_right(self._starts, start)
        is_known = at > 0 and start < self._ends[at - 1]
        if start < 1 or is_known or (at < len(self._starts) and self._starts[at] < end):
            raise ValueError(f"line {start} is finished twice")
        joins_before = at > 0 and self._ends[at - 1] == start
        joins_after = at < len(self._starts) and self._starts[at] == end
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_before:
            self._ends[at - 1] = end
        elif joins_after:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
