"""Bugs of batches: checkpoints, takeovers, cancellations, and the two files of results."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, wrap

PAUSE_S = 1.0


@bug("batcher", "dying batchers", "I18")
def checkpoint_before_results() -> None:
    """A death between the two records loses the results of a block."""
    from shared.protocol.batch_log import BatchRecord, Results
    from workers.gateway.batches.run import BatchRun

    @wrap(BatchRun, "_store")
    async def early(store: Any, self: BatchRun, record: BatchRecord) -> None:
        if isinstance(record, Results):
            await store(self, replace(record, output=[], errors=[], lines=[]))
            await asyncio.sleep(PAUSE_S)
            record = replace(record, index=record.index + 1)
        await store(self, record)


@bug("batcher", "dying batchers", "I18")
def watermark_off_by_one() -> None:
    """Reading continues after the first unfinished line."""
    from shared.batches.open_lines import OpenLines

    @wrap(OpenLines, "position_before")
    def after(position_before: Any, self: OpenLines, line: int) -> Any:
        position = position_before(self, line)
        later = sorted(open_line for open_line in self.offsets.items() if open_line > position)
        return later[0] if later else position


@bug("batcher", "dying batchers", "I18")
def lines_repeated_at_takeover() -> None:
    """A batcher that takes over runs finished lines after the watermark again."""
    _forget_finished_lines()


@bug("batcher", "cancelled batches", "I18")
def finished_lines_refused_at_cancel() -> None:
    """The finished lines after the watermark get an error as well."""
    _forget_finished_lines()


def _forget_finished_lines() -> None:
    from shared.batches.line_set import LineSet
    from workers.gateway.batches import run

    class Forgetful(LineSet):
        def __contains__(self, line: int) -> bool:
            return False

    @wrap(LineSet, "update")
    def update_again(update: Any, self: LineSet, lines: Iterable[int]) -> None:
        update(self, [line for line in lines if line not in self])

    replace_attribute(run, "LineSet", Forgetful)
    replace_attribute(run, "is_complete", lambda checkpoint: True)


@bug("batcher", "stopped batchers", "I18")
def results_without_a_fence() -> None:
    """A batcher that was replaced while it was stopped continues to write."""
    from shared.errors import Fenced
    from shared.protocol import subjects
    from shared.protocol.batch_log import BatchRecord
    from shared.state.batch_log import BatchLog

    @wrap(BatchLog, "append")
    async def unfenced(append: Any, self: BatchLog, record: BatchRecord) -> None:
        try:
            await append(self, record)
        except Fenced:
            subject = subjects.stored_batch(self._subject)
            last = await self._bus.read_last(subjects.BATCHES_STREAM, subject)
            assert last is not None
            self._last_sequence = last.sequence
            await append(self, record)


@bug("batcher", "batches", "I18")
def block_without_its_last_line() -> None:
    from shared.batches.state import FinishedLine, results_of
    from shared.protocol.batch_log import Checkpoint, Results
    from workers.gateway.batches import run

    def shortened(
        index: int, at_s: int, finished: Sequence[FinishedLine], checkpoint: Checkpoint
    ) -> Results:
        return results_of(index, at_s, finished[:-1], checkpoint)

    replace_attribute(run, "results_of", shortened)


@bug("batcher", "batches", "I20")
def errors_counted_as_answers() -> None:
    from shared.batches.state import FinishedLine, checkpoint_after
    from shared.protocol.batch_log import Checkpoint
    from workers.gateway.batches import run

    def counted(
        before: Checkpoint,
        finished: Sequence[FinishedLine],
        position_before: Callable[[int], tuple[int, int]],
    ) -> Checkpoint:
        after = checkpoint_after(before, finished, position_before)
        num_lines = after.num_answered + after.num_refused
        return replace(after, num_answered=num_lines, num_refused=0)

    replace_attribute(run, "checkpoint_after", counted)


@bug("gateway", "batches", "I18")
def page_without_its_first_line() -> None:
    """A reader that continues in the middle of a batch misses a line."""
    from workers.gateway.backend import batches

    @wrap(batches, "read_page")
    async def late(read_page: Any, bus: Any, state: Any, start: Any) -> Any:
        lines, end, has_more = await read_page(bus, state, start)
        return lines[start.sequence > 1 :], end, has_more


@bug("batcher", "expired batches", "I18", "I21")
def window_without_effect() -> None:
    from workers.gateway.batches.run import BatchRun

    @wrap(BatchRun, "_wait_stop")
    async def wait(wait_stop: Any, self: BatchRun) -> Any:
        if (stop := await wait_stop(self)) != "expired":
            return stop
        await self._context.shutdown.asked.wait()
        return "shutdown"


@bug("batcher", "cancelled batches", "I21")
def cancel_forgets_lines_in_flight() -> None:
    from workers.gateway.batches.run import BatchRun

    @wrap(BatchRun, "__init__")
    def deaf(begin: Any, self: BatchRun, *args: Any) -> None:
        begin(self, *args)
        setattr(self._withdrawn, "set", lambda: None)  # noqa: B010


@bug("batcher", "batches", "I18")
def error_line_also_in_output() -> None:
    from shared.batches.state import FinishedLine, checkpoint_after, results_of
    from shared.protocol.batch_log import Checkpoint, Results
    from workers.gateway.batches import run

    def in_both(
        index: int, at_s: int, finished: Sequence[FinishedLine], checkpoint: Checkpoint
    ) -> Results:
        record = results_of(index, at_s, finished, checkpoint)
        return replace(record, output=[*record.output, *record.errors])

    def counted(
        before: Checkpoint,
        finished: Sequence[FinishedLine],
        position_before: Callable[[int], tuple[int, int]],
    ) -> Checkpoint:
        after = checkpoint_after(before, finished, position_before)
        num_bytes = after.output_bytes + after.error_bytes - before.error_bytes
        return replace(after, output_bytes=num_bytes)

    replace_attribute(run, "results_of", in_both)
    replace_attribute(run, "checkpoint_after", counted)
