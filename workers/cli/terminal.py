"""Output to the terminal and signals, for all commands."""

import asyncio
import contextlib
import errno
import io
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any, NoReturn

from cyclopts import App
from rich.console import Console
from rich.text import Text

from shared.errors import PagemillError
from shared.protocol.encoding import to_json
from workers.cli.inputs import find_unmarked
from workers.cli.outputs import fault_of

# After a longer silence, a user assumes that the command hangs.
NOTE_S = 4.0
EXIT_INTERRUPTED = 130

_HARMLESS = {n: "\ufffd" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}

out = Console()
errors = Console(stderr=True)


class ClosedOutput(io.StringIO):
    """Stdout that the caller has closed: a command that writes to it fails."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "stdout is closed")

    def fileno(self) -> int:
        return 1


def run_app(app: App) -> NoReturn:
    """Run the command line in `sys.argv`, and exit with the code that the command returns."""
    replace_closed_streams()
    try:
        code = app(result_action="return_value")
        sys.stdout.flush()
    except PagemillError as error:
        print_refusal(error)
        code = 1
    except BrokenPipeError:
        discard_buffered(sys.stdout)
        code = 1
    except OSError as error:
        discard_buffered(sys.stdout)
        print_refusal(fault_of(error))
        code = 1
    sys.exit(code)


def replace_closed_streams() -> None:
    """Open /dev/null in place of standard streams that the caller has closed.

    A file or socket would otherwise get their numbers, and what a library or another process prints
    would end there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or ClosedOutput()
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def discard_buffered(output: IO[str]) -> None:
    """Redirect an output without a reader to /dev/null.

    Python flushes buffered text at exit, and a failed flush would change the exit code to 120.
    """
    with contextlib.suppress(io.UnsupportedOperation):  # It may have no descriptor.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output.fileno())
        os.close(null)


def harmless(text: str) -> str:
    """Return a text with U+FFFD in place of control characters other than newline and tab.

    With control characters, a text of a model or a client could move the cursor, clear the screen
    or write to the clipboard.
    """
    return text.translate(_HARMLESS)


def write_text(text: str) -> None:
    """Write a text to stdout: harmless on a terminal, and unchanged for any other reader."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    write_text(to_json(value).decode() + "\n")


def print_line(text: str) -> None:
    """Print a line without markup. It may hold names and texts from clients."""
    out.print(harmless(text), highlight=False, markup=False, soft_wrap=True)


def print_wrapped(console: Console, text: str, style: str = "", *, mark: str = "") -> None:
    """Print lines without markup; a terminal gets them with line breaks between words.

    Words, such as addresses, stay whole, and so do lines that begin with a space, such as commands
    to copy. `mark` is a red word at the beginning.
    """
    lines = harmless(f"{mark} {text}" if mark else text).split("\n")
    if console.is_terminal:
        width = console.width
        lines = [line if line.startswith(" ") else _wrap(line, width) for line in lines]
    printed = Text("\n".join(lines), style=style)
    printed.stylize("red", 0, len(mark))
    console.print(printed, highlight=False, soft_wrap=True)


def _wrap(line: str, width: int) -> str:
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def note_unmarked(text: str) -> None:
    """Print a note about each file that a text names without an `@`."""
    for name in find_unmarked(text):
        print_note(f"{name} is a file: write @{name} to add it")


def print_note(text: str) -> None:
    """Print a dim line on stderr, next to the output of a command."""
    print_wrapped(errors, text, "dim")


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """Print a note, and repeat it every few seconds until the body has ended."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(NOTE_S):
            print_note(text)

    print_note(text)
    ticker = threading.Thread(target=repeat, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        ended.set()
        ticker.join()


def print_rows(rows: Mapping[str, object]) -> None:
    """Print a name and a value per line, without values that are None."""
    for name, value in rows.items():
        if value is not None:
            print_line(f"{name:<8} {value}")


def print_columns(
    rows: Sequence[Sequence[str]], above: Sequence[Sequence[str]] = (), *, cuts: bool = False
) -> None:
    """Print the cells of rows in columns, also if they are wider than the terminal.

    `above` are rows that were printed before. With `cuts`, the last cells are cut to the width of a
    terminal.
    """
    widths = [max(map(len, column)) for column in zip(*above, *rows, strict=True)]
    for *cells, last in rows:
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
        line = "  ".join([*padded, last])
        is_cut = cuts and out.is_terminal and len(line) > out.width
        print_line(line[: out.width - 1] + "…" if is_cut else line)


def format_age(age_s: float) -> str:
    """Return a number of seconds in at most six characters."""
    for limit_s, unit, unit_s in ((100, "s", 1), (6000, "min", 60), (360_000, "h", 3600)):
        if age_s < limit_s:
            return f"{max(0.0, age_s) / unit_s:.0f} {unit}"
    return f"{age_s / 86_400:.0f} d"


def format_time(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def print_refusal(error: PagemillError) -> None:
    """Print the error of a command."""
    print_wrapped(errors, f"{error.code}: {error.message}", mark="error")


def call_on_signals(
    handler: Callable[[], object], *, on_hangup: Callable[[], object] | None = None
) -> None:
    """Call `handler` on Ctrl-C and SIGTERM, and `on_hangup` on SIGHUP.

    `on_hangup` is `handler` by default. Under nohup, SIGHUP stays ignored.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, on_hangup or handler)


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Make Ctrl-C cancel the task, which can then still cancel the request at the broker."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
