"""Lines of one batch that are read and have no result in the log. Pure."""

from collections import deque
from dataclasses import dataclass, field

from shared.batches.input_file import LineCutter
from shared.batches.state import FinishedLine

BLOCK_BYTES = 2**18
"""Limit on the results of one record. A longer result has its own record."""


@dataclass(slots=True)
class OpenLines:
    """The lines in flight, and the results that wait to be written in blocks."""

    cutter: LineCutter
    """Its position is the position of the next line to read."""
    offsets: dict[int, int] = field(default_factory=dict)
    """Positions of the lines that were read and have no result in the log."""
    finished: deque[FinishedLine] = field(default_factory=deque)
    num_bytes: int = 0
    """Bytes of these results."""

    def add(self, result: FinishedLine) -> None:
        self.finished.append(result)
        self.num_bytes += len(result.content)

    def take_block(self) -> list[FinishedLine]:
        """Remove and return the oldest results: one, or as many as fit into a block."""
        block: list[FinishedLine] = []
        num_bytes = 0
        while self.finished:
            num_bytes += len(self.finished[0].content)
            if block and num_bytes > BLOCK_BYTES:
                break
            block.append(self.finished.popleft())
            self.num_bytes -= len(block[-1].content)
            self.offsets.pop(block[-1].line, None)
        return block

    def position_before(self, line: int) -> tuple[int, int]:
        """Return where reading must continue if `line` is the first one without a result."""
        if line in self.offsets:
            return line, self.offsets[line]
        return self.cutter.next_line, self.cutter.next_offset
