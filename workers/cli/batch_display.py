"""Display of a batch in the terminal: its progress, its rate, the time left, and its errors."""

from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shared.batches.state import BatchState
from workers.cli.terminal import errors, harmless, print_note

MAX_CODES = 3
"""Codes of errors next to the bar. The others are counted together."""
NOTE_S = 60.0
"""Interval of the notes that replace the bar without a terminal."""


class _RateColumn(ProgressColumn):
    """Lines per second of the last half minute."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} lines/s")


class BatchDisplay:
    """Progress bar of one batch on stderr. Without a terminal, it is a note every minute."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[errors]}", markup=False),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, errors="")
        self._noted_s = self._progress.get_time()

    def __enter__(self) -> "BatchDisplay":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, state: BatchState) -> None:
        """Show the latest state."""
        now = state.checkpoint
        refused = errors_by_code(now.error_counts, MAX_CODES)
        finished = now.num_answered + now.num_refused
        self._progress.update(
            self._task,
            description=state.status,
            total=now.num_lines or None,
            completed=finished,
            errors=refused,
        )
        if not errors.is_terminal and self._progress.get_time() - self._noted_s >= NOTE_S:
            self._noted_s = self._progress.get_time()
            print_note(f"{state.status}: {finished} of {now.num_lines} lines {refused}".rstrip())


def errors_by_code(counts: Mapping[str, int], limit: int | None = None) -> str:
    """Return a text such as `3 errors: 2 invalid_media, 1 context_too_long`; "" without errors."""
    if not (total := sum(counts.values())):
        return ""
    kinds = [f"{number} {code}" for code, number in Counter(counts).most_common(limit)]
    if limit is not None and len(counts) > limit:
        kinds.append("others")
    return harmless(f"{total} {'error' if total == 1 else 'errors'}: {', '.join(kinds)}")
