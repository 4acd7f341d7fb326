"""Positions in the results of a batch, at which a client continues to read. Pure."""

import re
from typing import NamedTuple

from shared.errors import InvalidRequest

_POSITION = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,9}))?")


class ResultPosition(NamedTuple):
    """Position before a line with a result.

    As text it names what was read: `N` the records of the log up to number N in the stream, and
    `N-K` only the first K lines of record N.
    """

    sequence: int = 1
    num_read: int = 0
    """Lines of the record with this sequence that were read before."""

    def __str__(self) -> str:
        return f"{self.sequence}-{self.num_read}" if self.num_read else str(self.sequence - 1)


def after_line(sequence: int, line: int, num_lines: int) -> ResultPosition:
    """Return the position after one of the lines of a record, which count from 1."""
    if line == num_lines:
        return ResultPosition(sequence + 1)
    return ResultPosition(sequence, line)


def parse_position(text: str, field: str) -> ResultPosition:
    """Return the position of a text. Raises InvalidRequest with `field`."""
    match = _POSITION.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"{field} must be the X-Next-After of a page, or the id of an event", field=field
        )
    sequence, num_read = int(match[1]), int(match[2] or 0)
    return ResultPosition(sequence, num_read) if num_read else ResultPosition(sequence + 1)
