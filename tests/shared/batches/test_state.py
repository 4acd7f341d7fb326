"""State of a batch: any beginning of a log, any takeover, and logs that contradict themselves."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from shared.batches.input_file import LineCutter, RawLine
from shared.batches.line_set import LineSet
from shared.batches.open_lines import OpenLines
from shared.batches.state import (
    BatchState,
    FinishedLine,
    checkpoint_after,
    faults_of,
    is_complete,
    results_of,
)
from shared.protocol.batch_log import (
    BatchBegun,
    BatchCancelled,
    BatchEnded,
    BatchRecord,
    Checkpoint,
    Claimed,
    Results,
    Validated,
    decode_batch_record,
)
from shared.protocol.encoding import to_json
from shared.protocol.records import Usage

BEGUN = BatchBegun("batch_1", "t", "/v1/completions", "0" * 64, 1, "1h", 3601, 9999)
MAX_IN_FLIGHT = 5
SEEDS = st.integers(0, 2**32)
CODES = ("batch_expired", "batch_cancelled")
FAULTS = ["twice", "early", "watermark", "lost", "both files", "errors"]


def file_of(num_lines: int) -> bytes:
    return b"\n".join(b"x" * (1 + line % 7) for line in range(1, num_lines + 1))


def content_of(line: int, content: bytes) -> bytes:
    error = {"code": CODES[line % 2], "message": content.decode()} if line % 3 == 0 else None
    return to_json({"line": line, "content": content.decode(), "error": error})


class Batcher:
    """A batcher without a broker, which appends to `log`."""

    def __init__(self, log: list[BatchRecord], file: bytes) -> None:
        self.log = log
        checkpoint = self.checkpoint
        self.append(Claimed(0, 0, "b", checkpoint))
        cutter = LineCutter(100, checkpoint.next_line, checkpoint.next_offset)
        self.lines = OpenLines(cutter)
        self.finished = LineSet.unpack(checkpoint.finished)
        self.unread = cutter.feed(file[checkpoint.next_offset :], is_last=True)
        self.in_flight: list[RawLine] = []

    @property
    def checkpoint(self) -> Checkpoint:
        return self.log[-1].checkpoint if self.log else Checkpoint()

    def append(self, record: BatchRecord) -> None:
        stored = decode_batch_record(to_json(replace(record, index=len(self.log))))
        assert stored is not None
        self.log.append(stored)

    def begin_line(self) -> None:
        for line in self.unread:
            if line.number not in self.finished:
                self.lines.offsets[line.number] = line.offset
                self.in_flight.append(line)
                return

    def finish_line(self, number: int) -> None:
        line = self.in_flight.pop(number % len(self.in_flight))
        content = content_of(line.number, line.content)
        code = "" if line.number % 3 else CODES[line.number % 2]
        self.lines.add(FinishedLine(line.number, content, code, Usage(line.number, 1)))

    def write(self) -> None:
        if block := self.lines.take_block():
            checkpoint = checkpoint_after(self.checkpoint, block, self.lines.position_before)
            self.append(results_of(0, 0, block, checkpoint))


def run(rng: random.Random, num_lines: int) -> Iterator[list[BatchRecord]]:
    """Run a batch with batchers that die at any moment. Yield its log after each action."""
    log: list[BatchRecord] = []
    file = file_of(num_lines)
    batcher = Batcher(log, file)
    batcher.append(Validated(0, 0, Checkpoint(num_lines=num_lines, began_s=0)))
    while not is_complete(batcher.checkpoint):
        action = rng.choice(["begin", "begin", "finish", "finish", "write", "die"])
        if action == "begin" and len(batcher.in_flight) < MAX_IN_FLIGHT:
            batcher.begin_line()
        elif action == "finish" and batcher.in_flight:
            batcher.finish_line(rng.randrange(MAX_IN_FLIGHT))
        elif action == "write":
            batcher.write()
        elif action == "die" and rng.random() < 0.5:
            batcher = Batcher(log, file)
        yield log
    batcher.append(BatchEnded(0, 0, "completed", batcher.checkpoint))
    yield log


@given(SEEDS, st.integers(1, 30))
def test_each_line_has_one_result_whatever_dies(seed: int, num_lines: int) -> None:
    for log in run(random.Random(seed), num_lines):
        assert faults_of(log) == []
    contents = [
        (line, bytes(content))
        for record in log
        if isinstance(record, Results)
        for line, content in zip(record.lines, [*record.output, *record.errors], strict=True)
    ]
    file = file_of(num_lines).split(b"\n")
    assert sorted(contents) == sorted(
        (line, content_of(line, file[line - 1])) for line in range(1, num_lines + 1)
    )
    now = log[-1].checkpoint
    assert (now.num_answered, now.num_refused) == (num_lines - num_lines // 3, num_lines // 3)
    refused = Counter(CODES[line % 2] for line in range(3, num_lines + 1, 3))
    assert now.error_counts == dict(refused)
    assert now.output_bytes + now.error_bytes == sum(len(content) + 1 for _, content in contents)
    answered = [line for line in range(1, num_lines + 1) if line % 3]
    assert now.usage == Usage(sum(range(1, num_lines + 1)), num_lines)
    assert len(answered) == now.num_answered
    assert LineSet.unpack(now.finished).ranges == [(1, num_lines + 1)]


@given(SEEDS, st.integers(1, 30))
def test_reading_continues_at_an_unfinished_line_at_the_latest(seed: int, num_lines: int) -> None:
    file = file_of(num_lines)
    for log in run(random.Random(seed), num_lines):
        now = log[-1].checkpoint
        assert now.next_line <= LineSet.unpack(now.finished).first_missing
        assert file[: now.next_offset].count(b"\n") == min(now.next_line, num_lines) - 1


@given(SEEDS, st.integers(2, 20), st.sampled_from(FAULTS))
def test_a_contradiction_in_a_log_is_found(seed: int, num_lines: int, fault: str) -> None:
    rng = random.Random(seed)
    (*_, log) = run(rng, num_lines)
    records = [*log]
    place = rng.choice([i for i, record in enumerate(records) if isinstance(record, Results)])
    results = records[place]
    assert isinstance(results, Results)
    now = results.checkpoint
    if fault == "twice":
        records.insert(place, results)
    elif fault == "early":
        # The checkpoint of the block is stored before its results.
        records.insert(place, Claimed(place, 0, "b", now))
    elif fault == "watermark":
        first = LineSet.unpack(now.finished).first_missing
        records[place] = replace(results, checkpoint=replace(now, next_line=first + 1))
    elif fault == "errors":
        records[place] = replace(results, checkpoint=replace(now, error_counts={"other": 1}))
    elif fault == "lost":
        del records[place]
    else:
        content = [*results.output, *results.errors][0]
        more = replace(results, errors=[*results.errors, Raw(bytes(content))])
        records[place] = replace(more, lines=[*results.lines, results.lines[0]])
    renumbered = [replace(record, index=i) for i, record in enumerate(records)]
    assert faults_of(renumbered) != []


def test_the_status_follows_from_the_orders_and_the_last_record() -> None:
    validated = Validated(1, 7, Checkpoint(num_lines=2, began_s=7))
    order = BatchCancelled(8)
    assert BatchState(BEGUN).status == "validating"
    assert BatchState(BEGUN, None, Claimed(0, 6, "b", Checkpoint())).status == "validating"
    assert BatchState(BEGUN, None, validated).status == "in_progress"
    assert BatchState(BEGUN, order, validated).status == "cancelling"
    # A batch may have ended before the order to cancel it was read.
    ended = BatchEnded(2, 9, "completed", validated.checkpoint)
    assert BatchState(BEGUN, order, ended).status == "completed"


@pytest.mark.parametrize("line", [1, 3])
def test_a_line_without_place_is_refused(line: int) -> None:
    before = Checkpoint(num_lines=2, finished=LineSet([(1, 2)]).packed, next_line=2, began_s=0)
    with pytest.raises(ValueError, match="line"):
        checkpoint_after(before, [FinishedLine(line, b"{}")], lambda n: (n, 0))
