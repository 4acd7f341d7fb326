"""Lines that `pagemill up` prints to stderr: what starts, what is ready, and how it ends."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from workers.cli.terminal import discard_buffered

# A line about a worker that still starts comes at most this often.
PROGRESS_S = 4.0
TITLE_LEN = 22


class StartDisplay:
    """The display of one start: live lines on a terminal, plain lines elsewhere.

    A terminal that is closed takes no lines. The drain that its end has begun must go on, so a
    failed write is ignored.
    """

    def __init__(
        self, console: Console, *, live: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._title_to_text: dict[str, str] = {}
        self._shown: dict[str, tuple[float, str]] = {}
        """Time and text of the last plain line about each worker."""
        self._live = Live(console=console, transient=True, auto_refresh=False) if live else None

    def open(self) -> None:
        if self._live is not None:
            self._attempt(self._live.start)

    def close(self) -> None:
        """Remove the live lines; those that are printed stay."""
        if self._live is not None:
            self._attempt(self._live.stop)
            self._live = None

    def ready(self, title: str, after_s: float) -> None:
        self._title_to_text.pop(title, None)
        if self._live is not None:
            self._refresh(self._live)
        self.say(f"{title:<{TITLE_LEN}} ready in {after_s:.1f} s")

    def progress(self, title: str, text: str) -> None:
        if self._live is not None:
            if self._title_to_text.get(title) != text:
                self._title_to_text[title] = text
                self._refresh(self._live)
            return
        now_s = self._clock()
        at_s, before = self._shown.setdefault(title, (now_s, ""))
        if text != before and now_s - at_s >= PROGRESS_S:
            self._shown[title] = now_s, text
            self.say(_line(title, text))

    def say(self, text: str, style: str = "") -> None:
        """Print a line as it is: it may hold names from the configuration."""
        self._attempt(
            lambda: self._console.print(Text(text, style=style), soft_wrap=True, highlight=False)
        )

    def _refresh(self, live: Live) -> None:
        lines = [_line(title, text) for title, text in self._title_to_text.items()]
        shown = Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")
        self._attempt(lambda: live.update(shown, refresh=True))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, SystemExit):
            # rich raises SystemExit when the reader of a pipe is gone.
            self._live = None
            self._console.quiet = True
            discard_buffered(self._console.file)


def _line(title: str, text: str) -> str:
    return f"{title:<{TITLE_LEN}} {text}"
