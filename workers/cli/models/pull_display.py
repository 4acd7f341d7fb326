"""Progress of a download: a bar on a terminal, plain lines elsewhere, never silent for long."""

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from workers.cli.terminal import print_wrapped

LINE_S = 4.0


class PullDisplay:
    def __init__(
        self,
        console: Console,
        *,
        live: bool,
        line_s: float = LINE_S,
        waiting: str = "connecting to the hub …",
    ) -> None:
        self._console = console
        self._waiting = waiting
        self._line_s = line_s
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._name, self._size, self._done = "", 0, 0
        self._began_s, self._before = time.monotonic(), 0
        self._bars = _bars(console) if live else None
        # A bar without a size would look like a download.
        self._bar = self._bars.add_task("", start=False, visible=False) if self._bars else None

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        else:
            self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._bars is not None:
            self._bars.stop()
        else:
            self._ticker.join()

    def begin(self, name: str, size: int, done: int) -> None:
        self._name, self._size, self._done, self._before = name, size, done, done
        self._began_s = time.monotonic()
        if self._bars is not None and self._bar is not None:
            self._bars.reset(self._bar, total=size, completed=done, visible=True, description=name)
        rest = f", from {decimal(done)} on" if done else ""
        self.say(f"{name}: {decimal(size)}{rest}")

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=self._done)

    def say(self, text: str) -> None:
        """Print a line without markup, because it may contain names from a hub."""
        print_wrapped(self._console, text)

    def _tick(self) -> None:
        while not self._ended.wait(self._line_s):
            rate = (self._done - self._before) / (time.monotonic() - self._began_s)
            if self._name:
                self.say(
                    f"{self._name}: {decimal(self._done)} of {decimal(self._size)},"
                    f" {decimal(int(max(0, rate)))}/s"
                )
            else:
                self.say(self._waiting)


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
