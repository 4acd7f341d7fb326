"""State of a batch, which follows from its log and the orders of its client. Pure.

Every record of the log contains the checkpoint up to and including this record. So the last record
alone is enough to continue a batch, and a batcher takes over a long one as fast as a short one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from msgspec import Raw
from msgspec.structs import astuple, replace

from shared.batches.line_errors import error_code_of
from shared.batches.line_set import LineSet
from shared.protocol.batch_log import (
    BatchBegun,
    BatchCancelled,
    BatchEnded,
    BatchRecord,
    Checkpoint,
    Claimed,
    Results,
    Status,
    Validated,
)
from shared.protocol.records import Usage

NO_USAGE = Usage(0, 0)


class FinishedLine(NamedTuple):
    """Result of one line of the input."""

    line: int
    content: bytes
    """Line of the output file or of the error file, as JSON without a line break."""
    code: str = ""
    """Code of the error if it belongs to the error file."""
    usage: Usage = NO_USAGE


@dataclass(frozen=True, slots=True)
class BatchState:
    """State of a batch, from its orders and the last record of its log."""

    begun: BatchBegun
    cancelled: BatchCancelled | None = None
    last: BatchRecord | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint() if self.last is None else self.last.checkpoint

    @property
    def ended(self) -> BatchEnded | None:
        return self.last if isinstance(self.last, BatchEnded) else None

    @property
    def status(self) -> Status:
        if self.ended is not None:
            return self.ended.status
        if self.cancelled is not None:
            return "cancelling"
        return "validating" if self.checkpoint.began_s is None else "in_progress"


def checkpoint_after(
    before: Checkpoint,
    finished: Sequence[FinishedLine],
    position_before: Callable[[int], tuple[int, int]],
) -> Checkpoint:
    """Return the checkpoint of a record with further lines.

    `position_before` returns a line and its offset in the input. The line is the given one, or an
    earlier one. Raises ValueError for a line that was finished before, or is not part of the input.
    """
    lines, num_tokens = LineSet.unpack(before.finished), [*astuple(before.usage)]
    errors = [result for result in finished if result.code]
    error_counts = Counter(before.error_counts) + Counter(result.code for result in errors)
    error_bytes, num_bytes = _num_bytes(errors), _num_bytes(finished)
    lines.update(result.line for result in finished)
    if (last := lines.last) > before.num_lines:
        raise ValueError(f"the input has no line {last}")
    for result in finished:
        if result.usage is not NO_USAGE:
            num_tokens = [*map(add, num_tokens, astuple(result.usage))]
    next_line, next_offset = position_before(lines.first_missing)
    return replace(
        before,
        finished=lines.packed,
        next_line=next_line,
        next_offset=next_offset,
        num_answered=before.num_answered + len(finished) - len(errors),
        num_refused=before.num_refused + len(errors),
        error_counts=dict(error_counts),
        usage=Usage(*num_tokens),
        output_bytes=before.output_bytes + num_bytes - error_bytes,
        error_bytes=before.error_bytes + error_bytes,
    )


def _num_bytes(finished: Sequence[FinishedLine]) -> int:
    """Return the size of lines in a file, with their line breaks."""
    return sum(len(result.content) for result in finished) + len(finished)


def results_of(
    index: int, at_s: int, finished: Sequence[FinishedLine], checkpoint: Checkpoint
) -> Results:
    """Return the record of finished lines, with the checkpoint of `checkpoint_after`."""
    output = [result for result in finished if not result.code]
    errors = [result for result in finished if result.code]
    return Results(
        index,
        at_s,
        [Raw(result.content) for result in output],
        [Raw(result.content) for result in errors],
        [result.line for result in (*output, *errors)],
        checkpoint,
    )


def is_complete(checkpoint: Checkpoint) -> bool:
    """Return whether all lines are finished."""
    return (
        checkpoint.began_s is not None
        and checkpoint.num_answered + checkpoint.num_refused == checkpoint.num_lines
    )


def faults_of(records: Sequence[BatchRecord]) -> list[str]:
    """Return the contradictions in a whole log; a correct log, and any beginning of it, has none.

    The checkpoints are compared with the results in the log.
    """
    faults: list[str] = []
    expected, ended = Checkpoint(), False
    for number, record in enumerate(records):
        if record.index != number:
            faults.append(f"record {number} has the index {record.index}")
        if ended:
            faults.append(f"record {number} follows the end")
        try:
            expected = _expected(expected, record)
        except ValueError as error:
            faults.append(f"record {number}: {error}")
        if record.checkpoint != expected:
            faults.append(f"the checkpoint of record {number} differs from the results before it")
            expected = record.checkpoint
        ended = isinstance(record, BatchEnded)
    return faults


def _expected(before: Checkpoint, record: BatchRecord) -> Checkpoint:
    """Return the right checkpoint of a record. Raises ValueError for a record that is not next."""
    match record:
        case Claimed():
            return before
        case Validated(checkpoint=now):
            if before.began_s is not None:
                raise ValueError("the input is validated again")
            return Checkpoint(num_lines=now.num_lines, began_s=now.began_s)
        case Results():
            return _after(before, record)
        case BatchEnded():
            if record.status == "completed" and not is_complete(before):
                raise ValueError("a batch with unfinished lines is completed")
            return before


def _after(before: Checkpoint, record: Results) -> Checkpoint:
    contents = [*record.output, *record.errors]
    are_output = [True] * len(record.output) + [False] * len(record.errors)
    if len(contents) != len(record.lines):
        raise ValueError("the numbers of lines and of results differ")
    finished = [
        FinishedLine(line, bytes(content), "" if is_output else error_code_of(bytes(content)))
        for line, content, is_output in zip(record.lines, contents, are_output, strict=True)
    ]
    # Usage and position are not part of the results.
    now = record.checkpoint
    counted = checkpoint_after(before, finished, lambda line: (now.next_line, now.next_offset))
    if now.next_line > LineSet.unpack(counted.finished).first_missing:
        raise ValueError("reading would continue after an unfinished line")
    return replace(counted, usage=now.usage)
