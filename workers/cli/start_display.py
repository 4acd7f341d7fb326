"""Lines that `pagemill up` prints to stderr about starting and ready workers."""

import asyncio
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from workers.cli.terminal import discard_buffered, print_wrapped

# Pause without output after which the steps of starting workers are printed.
PROGRESS_S = 4.0
TICK_S = 0.5
MIN_TITLE_LEN = 22


class StartDisplay:
    """Display of one start: live lines on a terminal, plain lines elsewhere.

    Failed writes are ignored: the end of the terminal begins the drain, which must not be
    interrupted by them.
    """

    def __init__(
        self, console: Console, *, live: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._title_to_text: dict[str, str] = {}
        self._title_to_step: dict[str, tuple[str, float]] = {}
        """Current step of each worker, and the time when it began."""
        self._printed_s = clock()
        """Time of the last plain line."""
        self._live = Live(console=console, transient=True, auto_refresh=False) if live else None

    def open(self) -> None:
        if self._live is not None:
            self._attempt(self._live.start)

    def close(self) -> None:
        """Remove the live lines. Printed lines stay."""
        if self._live is not None:
            self._attempt(self._live.stop)
            self._live = None

    async def keep_current(self) -> None:
        """Show how long the workers have been at their steps, until this is cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        if self._live is not None:
            self._refresh(self._live)
        elif self._clock() - self._printed_s >= PROGRESS_S:
            for line in self._lines():
                self.say(line)

    def ready(self, title: str, after_s: float) -> None:
        self._title_to_text.pop(title, None)
        if self._live is not None:
            self._refresh(self._live)
        self.say(f"{self._pad(title)} ready in {after_s:.1f} s")

    def progress(self, title: str, text: str) -> None:
        # The text after the comma is the progress of the step.
        step = text.partition(",")[0]
        if self._title_to_step.get(title, ("", 0.0))[0] != step:
            self._title_to_step[title] = step, self._clock()
        if self._title_to_text.get(title) != text:
            self._title_to_text[title] = text
            if self._live is not None:
                self._refresh(self._live)

    def say(self, text: str, style: str = "") -> None:
        """Print a line without markup, because it may contain names from the configuration."""
        self._printed_s = self._clock()
        self._attempt(lambda: print_wrapped(self._console, text, style))

    def _refresh(self, live: Live) -> None:
        text = Text("\n".join(self._lines()), style="dim", no_wrap=True, overflow="ellipsis")
        self._attempt(lambda: live.update(text, refresh=True))

    def _lines(self) -> list[str]:
        """Return a line about each worker that is not ready."""
        now_s = self._clock()
        return [
            f"{self._pad(title)} {text}, {now_s - self._title_to_step[title][1]:.0f} s"
            for title, text in self._title_to_text.items()
        ]

    def _pad(self, title: str) -> str:
        """Return a title with spaces up to the length of the longest one."""
        return title.ljust(max(MIN_TITLE_LEN, *map(len, self._title_to_step), len(title)))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, SystemExit):
            # rich raises SystemExit when the reader of a pipe has closed it.
            self._live = None
            self._console.quiet = True
            discard_buffered(self._console.file)
